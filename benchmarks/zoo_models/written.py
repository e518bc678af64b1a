"""Models written here: message passing on graphs, tables, recurrence, physics, and what the packages above lack."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_models.case import Built, written

GRAPH, TABLE, OTHER = "graph", "tabular", "other"
NODES, EDGES, CLASSES = 24, 80, 5


def graph() -> tuple[Tensor, Tensor, Tensor]:
    """Return node features ``[NODES, 16]``, edges ``[2, EDGES]`` and a class for every node."""
    return torch.randn(NODES, 16), torch.randint(0, NODES, (2, EDGES)), torch.randint(0, CLASSES, (NODES,))


class GraphConvolution(nn.Module):
    """Sum of the neighbours' features, each weighed by the roots of both degrees."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return new features of every node."""
        source, target = edges[0], edges[1]
        degree = torch.zeros(x.shape[0]).index_add(0, target, torch.ones(target.shape[0])) + 1
        weight = degree.rsqrt()[source] * degree.rsqrt()[target]
        x = self.linear(x)
        return x / degree[:, None] + torch.zeros_like(x).index_add(0, target, x[source] * weight[:, None])


class GraphAttention(nn.Module):
    """Attention over the incoming edges of every node, with a softmax by scatter."""

    def __init__(self, inner: int, outer: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(inner, outer)
        self.score = nn.Parameter(torch.randn(2, heads, outer // heads) * 0.3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return new features of every node."""
        source, target = edges[0], edges[1]
        x = self.linear(x).view(x.shape[0], self.heads, -1)
        scores = (x * self.score[0]).sum(-1)[source] + (x * self.score[1]).sum(-1)[target]
        scores = F.leaky_relu(scores, 0.2)
        index = target[:, None].expand_as(scores)
        top = torch.full((x.shape[0], self.heads), -1e9).scatter_reduce(0, index, scores.detach(), "amax")
        weight = (scores - top[target]).exp()
        total = torch.zeros(x.shape[0], self.heads).scatter_add(0, index, weight)
        messages = x[source] * (weight / total[target].clamp(min=1e-9))[..., None]
        out = torch.zeros_like(x).index_add(0, target, messages)
        return F.elu(out.flatten(1))


class MessagePassing(nn.Module):
    """A network on every edge, a mean over a node's edges, a recurrent update of the node."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width + features, width), nn.ReLU(), nn.Linear(width, width))
        self.update = nn.GRUCell(width, width)

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        """Return new features of every node."""
        source, target = edges[0], edges[1]
        messages = self.message(torch.cat([x[source], x[target], features], -1))
        index = target[:, None].expand_as(messages)
        mean = torch.zeros_like(x).scatter_reduce(0, index, messages, "mean", include_self=False)
        updated: Tensor = self.update(mean, x)
        return updated


class GraphNet(nn.Module):
    """Two layers on a graph, then the cross-entropy over nodes."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and logits."""
        for i, layer in enumerate(self.layers):
            x = layer(x, edges)
            if i + 1 < len(self.layers):
                x = F.dropout(F.relu(x), 0.2, self.training)
        return F.cross_entropy(x, labels), x


@written(GRAPH)
def graph_convolution() -> Built:
    """Kipf and Welling's network."""
    return GraphNet([GraphConvolution(16, 32), GraphConvolution(32, CLASSES)]), graph(), {}


@written(GRAPH)
def graph_attention() -> Built:
    """Velickovic's network."""
    return GraphNet([GraphAttention(16, 32, 4), GraphAttention(32, CLASSES, 1)]), graph(), {}


class Molecules(nn.Module):
    """Message passing, a sum over each graph of a batch, a regression."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(16, 32)
        self.passing = MessagePassing(32, 4)
        self.end = nn.Sequential(nn.Linear(32, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor, edges: Tensor, features: Tensor, owner: Tensor, target: Tensor) -> Tensor:
        """Return the squared error."""
        x = self.start(x)
        for _ in range(3):
            x = self.passing(x, edges, features)
        pooled = torch.zeros(target.shape[0], x.shape[1]).index_add(0, owner, x)
        return F.mse_loss(self.end(pooled)[:, 0], target)


@written(GRAPH)
def message_passing() -> Built:
    """Gilmer's network on four molecules."""
    x, edges, _ = graph()
    owner = torch.arange(NODES) // 6
    return Molecules(), (x, edges, torch.randn(EDGES, 4), owner, torch.randn(4)), {}


class Equivariant(nn.Module):
    """Messages by distance; coordinates move along the differences (EGNN)."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(33, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU())
        self.move = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1))
        self.node = nn.Sequential(nn.Linear(32, 16), nn.SiLU(), nn.Linear(16, 16))

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features ``[B, N, 16]`` and coordinates ``[B, N, 3]`` after two rounds."""
        for _ in range(2):
            gap = x[:, :, None] - x[:, None]
            square = gap.square().sum(-1, keepdim=True)
            n = h.shape[1]
            pair = torch.cat([h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1), square], -1)
            message = self.edge(pair)
            x = x + (gap * self.move(message)).mean(2)
            h = h + self.node(torch.cat([h, message.sum(2)], -1))
        return h, x


@written(GRAPH)
def equivariant_graph() -> Built:
    """Satorras's network on all pairs."""
    return Equivariant(), (torch.randn(4, 6, 16), torch.randn(4, 6, 3)), {}


class TabularTransformer(nn.Module):
    """Every column is a token: numbers by a line, categories by a table (FT-Transformer)."""

    def __init__(self, numbers: int, categories: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numbers, 32) * 0.2)
        self.bias = nn.Parameter(torch.zeros(numbers, 32))
        self.tables = nn.ModuleList([nn.Embedding(n, 32) for n in categories])
        self.mark = nn.Parameter(torch.randn(1, 1, 32) * 0.2)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: Tensor, categories: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and logits."""
        tokens = [self.mark.expand(numbers.shape[0], -1, -1), numbers[..., None] * self.weight + self.bias]
        tokens += [table(categories[:, i])[:, None] for i, table in enumerate(self.tables)]
        logits = self.head(self.encoder(torch.cat(tokens, 1))[:, 0])[:, 0]
        return F.binary_cross_entropy_with_logits(logits, target), logits


@written(TABLE)
def tabular_transformer() -> Built:
    """Gorishniy's transformer."""
    inputs = torch.randn(8, 5), torch.randint(0, 7, (8, 3)), torch.rand(8).round()
    return TabularTransformer(5, [7, 7, 9]), inputs, {}


class TabularResNet(nn.Module):
    """Linear layers with batch norm, dropout and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(12, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32))
            for _ in range(3)
        )
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and logits."""
        x = self.start(x)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return F.cross_entropy(logits, y, label_smoothing=0.1), logits


@written(TABLE)
def tabular_resnet() -> Built:
    """A residual network for tables."""
    return TabularResNet(), (torch.randn(8, 12), torch.randint(0, 3, (8,))), {}


class Recommender(nn.Module):
    """Bags of embeddings, pairwise products, and networks below and above (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(50, 16, mode="sum") for _ in range(3)])
        self.below = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16))
        self.above = nn.Sequential(nn.Linear(16 + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: Tensor, click: Tensor) -> Tensor:
        """Return the loss."""
        vectors = torch.stack([self.below(dense), *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], 1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = torch.tril_indices(4, 4, -1)
        mixed = torch.cat([vectors[:, 0], products[:, rows, columns]], 1)
        return F.binary_cross_entropy_with_logits(self.above(mixed)[:, 0], click)


@written(TABLE)
def recommender() -> Built:
    """Facebook's recommender."""
    return Recommender(), (torch.randn(8, 6), torch.randint(0, 50, (8, 3, 4)), torch.rand(8).round()), {}


class FactorizationMachine(nn.Module):
    """Pairwise products of embeddings by the square of their sum, beside a deep part (DeepFM)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Embedding(60, 8), nn.Embedding(60, 1)
        self.deep = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, fields: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        offsets = torch.arange(4) * 15
        vectors = self.table(fields + offsets)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True)
        score = self.line(fields + offsets).sum(1) + pairs + self.deep(vectors.flatten(1))
        return F.mse_loss(score[:, 0], target)


@written(TABLE)
def factorization_machine() -> Built:
    """Guo's machine."""
    return FactorizationMachine(), (torch.randint(0, 15, (8, 4)), torch.randn(8)), {}


class Tagger(nn.Module):
    """A bidirectional LSTM over words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(32, 6)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        """Return the loss."""
        hidden, _ = self.lstm(self.table(words))
        return F.cross_entropy(self.head(hidden).transpose(1, 2), tags)


@written("recurrent")
def lstm_tagger() -> Built:
    """A tagger of words."""
    return Tagger(), (torch.randint(0, 40, (4, 6)), torch.randint(0, 6, (4, 6))), {}


class Translator(nn.Module):
    """A GRU that reads, and one that writes with attention on what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.reader = nn.GRU(16, 16, batch_first=True)
        self.writer = nn.GRUCell(32, 16)
        self.head = nn.Linear(16, 40)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        read, state = self.reader(self.table(source))
        state, loss = state[0], torch.zeros(())
        for step in range(target.shape[1] - 1):
            weight = (read @ state[..., None]).softmax(1)
            state = self.writer(torch.cat([self.table(target[:, step]), (weight * read).sum(1)], -1), state)
            loss = loss + F.cross_entropy(self.head(state), target[:, step + 1])
        return loss


@written("recurrent")
def gru_translator() -> Built:
    """A translator with additive steps."""
    return Translator(), (torch.randint(0, 40, (4, 5)), torch.randint(0, 40, (4, 4))), {}


class Spectral(nn.Module):
    """Products of the lowest frequencies, beside a 1x1 convolution (Fourier neural operator)."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Conv2d(1, 8, 1), nn.Conv2d(8, 1, 1)
        self.real = nn.Parameter(torch.randn(2, 8, 8, 4, 4, 2) * 0.1)
        self.local = nn.ModuleList([nn.Conv2d(8, 8, 1) for _ in range(2)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error."""
        x = self.start(x)
        for weight, local in zip(torch.view_as_complex(self.real), self.local):
            modes = torch.fft.rfft2(x)
            low = torch.einsum("bixy,ioxy->boxy", modes[:, :, :4, :4], weight)
            modes = F.pad(low, (0, modes.shape[3] - 4, 0, modes.shape[2] - 4))
            x = F.gelu(torch.fft.irfft2(modes, s=x.shape[-2:]) + local(x))
        return F.mse_loss(self.end(x), y)


@written("physics")
def fourier_operator() -> Built:
    """Li's operator."""
    return Spectral(), (torch.randn(4, 1, 16, 16), torch.randn(4, 1, 16, 16)), {}


class Radiance(nn.Module):
    """Samples along rays, sines of positions, a network, and the sum along each ray (NeRF)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3 + 24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, origin: Tensor, direction: Tensor, colour: Tensor) -> Tensor:
        """Return the squared error of the colours."""
        depth = torch.linspace(0.5, 2.0, 8)
        points = origin[:, None] + direction[:, None] * depth[:, None]
        angles = points[..., None] * (2.0 ** torch.arange(4))
        code = torch.cat([points, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)
        out = self.net(code)
        alpha = 1 - (-F.softplus(out[..., 3]) * 0.2).exp()
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-6], 1), 1)[:, :-1]
        return F.mse_loss(((alpha * clear)[..., None] * out[..., :3].sigmoid()).sum(1), colour)


@written("physics")
def radiance_field() -> Built:
    """Mildenhall's field."""
    return Radiance(), (torch.randn(8, 3), torch.randn(8, 3), torch.rand(8, 3)), {}


class Autoencoder(nn.Module):
    """Convolutions down, a normal latent, transposed convolutions up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ELU(), nn.Conv2d(8, 16, 4, 2, 1), nn.ELU(), nn.Flatten())
        self.latent = nn.Linear(16 * 16, 16)
        self.lift = nn.Linear(8, 16 * 16)
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(8, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and what was made again."""
        mean, log_variance = self.latent(self.down(x)).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        made = self.up(self.lift(z).view(-1, 16, 4, 4))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return F.mse_loss(made, x) + 1e-3 * divergence, made


@written("generative")
def variational_autoencoder() -> Built:
    """Kingma's autoencoder, with noise."""
    return Autoencoder(), (torch.randn(4, 3, 16, 16),), {}


class Points(nn.Module):
    """The same network on every point, then the maximum over all points (PointNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Sequential(
            nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1), nn.BatchNorm1d(32), nn.ReLU()
        )
        self.head = nn.Linear(32, 4)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.head(self.local(points.transpose(1, 2)).amax(2)), labels)


@written(OTHER)
def point_net() -> Built:
    """Qi's network."""
    return Points(), (torch.randn(4, 12, 3), torch.randint(0, 4, (4,))), {}


class Wave(nn.Module):
    """Dilated causal convolutions with gates and skips (WaveNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.gates = nn.ModuleList([nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(3)])
        self.mixes = nn.ModuleList([nn.Conv1d(16, 32, 1) for _ in range(3)])
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(16, 32, 1))

    def forward(self, samples: Tensor) -> Tensor:
        """Return the loss of the next sample."""
        x, total = self.table(samples).transpose(1, 2), torch.zeros(())
        for i, (gate, mix) in enumerate(zip(self.gates, self.mixes)):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            residual, skip = mix(a.tanh() * b.sigmoid()).chunk(2, 1)
            x, total = x + residual, total + skip
        return F.cross_entropy(self.head(total)[..., :-1], samples[:, 1:])


@written(OTHER)
def wave_net() -> Built:
    """Van den Oord's network."""
    return Wave(), (torch.randint(0, 32, (4, 16)),), {}


class Siamese(nn.Module):
    """Two views of a batch, and the contrastive loss over all pairs of the batch (SimCLR)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        views = torch.cat([x + 0.1 * torch.randn_like(x), x * 1.1])
        z = F.normalize(self.net(views), dim=-1)
        scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        return F.cross_entropy(scores, torch.arange(len(z)).roll(len(x)))


@written(OTHER)
def contrastive() -> Built:
    """Chen's loss."""
    return Siamese(), (torch.randn(8, 12),), {}


class Ode(nn.Module):
    """Four Runge-Kutta steps through a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 2)

    def slope(self, t: float, x: Tensor) -> Tensor:
        """Return the time derivative at ``x``."""
        found: Tensor = self.field(torch.cat([x, x.new_full((len(x), 1), t)], -1))
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Return what the end state is read as."""
        for step in range(4):
            t = step / 4
            a = self.slope(t, x)
            b = self.slope(t + 0.125, x + a / 8)
            c = self.slope(t + 0.125, x + b / 8)
            d = self.slope(t + 0.25, x + c / 4)
            x = x + (a + 2 * b + 2 * c + d) / 24
        read: Tensor = self.head(x)
        return read


@written("physics")
def neural_ode() -> Built:
    """Chen's differential equation."""
    return Ode(), (torch.randn(8, 8),), {}
