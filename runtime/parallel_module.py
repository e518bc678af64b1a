"""``ParallelModule``: the user's module again, running on all ranks of a mesh."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import InputError, OptionError, PlanError
from autopar.passes.program import Program
from autopar.placement import Layout, from_dtensor, layout_name, parse_layout
from autopar.plans import Options, Plan
from autopar.runtime.accumulation import Holding
from autopar.runtime.agree import require_equal, require_everyone
from autopar.runtime.choose_axis import is_open
from autopar.runtime.compile import Compiler, share_plan
from autopar.runtime.execute import Executable
from autopar.runtime.groups import MeshGroups
from autopar.runtime.known_calls import KnownCalls
from autopar.runtime.local_steps import step_locally
from autopar.runtime.rendezvous import meet
from autopar.runtime.shadow import Source
from autopar.runtime.signature import Call, Signature, take_apart
from autopar.runtime.situation import Situation, without_data
from autopar.runtime.stage_groups import alone, stage_groups, with_stages_of
from autopar.runtime.stage_state import add_nothing, clip_over_stages, full_state_of_stages, own_part
from autopar.runtime.staged_executable import StagedExecutable
from autopar.runtime.stale_optimizers import watch_originals
from autopar.runtime.state import Mirror, adapt_state, describe_state, full_state, lay_out, mirror, require_values

Example = tuple[tuple[Any, ...], dict[str, Any]]


class ParallelModule(Mirror):
    """A module split over a mesh. It computes what the original computes on the global batch.

    Parameters are DTensors on one mesh under their original names, buffers are replicated plain tensors. Every rank
    must make the same calls. A call with new shapes, modes or constants is traced and planned again, with the
    parameters pinned where they are.

    Args:
        model: the original.
        groups: the processes.
        options: what is asked of the plan.
        example: inputs to plan for at once; None to plan at the first call.
        loss: callable put behind the module's outputs, or None.
        plan: a plan for the first program, or the path of one.
        compile: what a program computes between its collectives is compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: MeshGroups,
        options: Options,
        *,
        example: Example | None = None,
        loss: Callable[..., Tensor] | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        with groups.together("reading the model"):
            source = Source.of(model, loss)
            call = None if example is None else take_apart(model, *example, device=None)
            if groups.rank == 0:
                require_values(model)
            watch_originals(model)
        require_equal(
            groups.control,
            "the model or an option",
            [f"class {type(model).__name__}", *describe_state(model), *_option_lines(options), f"compile={compile}"],
            "build the same model with the same options on every rank",
        )
        require_equal(
            groups.control,
            "the example",
            ["no example inputs"] if call is None else call.signature.lines,
            "give the same example on every rank, or none to plan at the first call",
        )
        given = share_plan(groups, plan)
        with groups.together("applying the plan's options"):
            if given is not None:
                _check_parameters(given, model)
                options = _merge_options(options, given)
        program, planned = None, given
        if call is not None and given is None and is_open(groups.mesh, options):
            program, planned = Compiler(source, alone(groups), compile).plan_first(call, options)
        if planned is not None:
            groups = with_stages_of(groups, planned)
        if program is not None and groups.rank == 0 and groups.mesh.pipeline:
            warnings.warn(
                f"the axis {groups.mesh.pipeline!r} is the pipeline axis, which is predicted to be best: a rank has "
                "the parameters of its own stages alone, so clip gradients by the module's own clip_grad_norm_(); "
                "autopar.Mesh(..., pipeline='') has no stages",
                stacklevel=3,
            )
        stage = stage_groups(groups)
        self._engine = _Engine(self, Compiler(source, stage, compile), options, given)
        if call is not None:
            self._engine.first(call, model, planned, program)
        elif stage.num_places > 1:
            raise OptionError(
                "a mesh with a pipeline axis needs example inputs: only a program tells which stage keeps which "
                "parameter; give example_inputs= to parallelize"
            )
        else:
            layouts = {} if given is None else _layouts(given)
            mirror(model, self, groups, layouts)
            self._engine.placed = given is not None
        step_locally(self.parameters())
        self._original = type(model).__name__
        self.register_load_state_dict_pre_hook(_adapt)

    @property
    def plan(self) -> Plan:
        """The plan of the program that ran last, or that will run first.

        Raises:
            InputError: nothing has been planned yet.
        """
        return self._engine.current_plan()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on all ranks; every rank makes the same call.

        Raises:
            InputError: on every rank, when the ranks' inputs do not fit together.
        """
        return self._engine.call(args, kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients wait: several backwards share one reduction, ZeRO-1 in place of ZeRO-2.

        The first backward behind it reduces the sums together with its own gradients, or the optimizer's step does.
        Until then each rank holds its part of every gradient, whole where the plan reduces and scatters it: more than
        the plan's memory says. Every rank enters it alike. A step in micro-batches reduces once a call here too.

        >>> with model.no_sync():  # doctest: +SKIP
        ...     model(x, y).backward()
        >>> model(x, y).backward()  # doctest: +SKIP
        """
        return self._engine.holding.held()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Clip the gradients by their global norm, and return it as a plain tensor. Every rank calls it.

        Without stages ``torch.nn.utils.clip_grad_norm_`` over ``parameters()`` does the same, and returns a DTensor.
        With stages it sees those of this rank's stages alone: use this.
        """
        stage = self._engine.stage
        if stage.num_places > 1:
            own = list(self.parameters())
            return clip_over_stages(own, max_norm, norm_type, error_if_nonfinite, foreach, stage)
        norm = nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state with full plain tensors: it loads strictly into the original module. Every rank calls it."""
        engine = self._engine
        require_everyone(engine.groups.control, "full_state_dict()")
        if engine.stage.num_places > 1:
            return full_state_of_stages(self.state_dict(), engine.shadow, engine.places, engine.stage)
        return full_state(self.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full plain tensors (equal on every rank) or DTensors of any layout. Every rank calls it.

        Raises:
            OptionError: ``assign`` is set: the parameters keep their DTensors.
        """
        if assign:
            raise OptionError("a parallel module can't take over tensors by assign=True; load without it")
        if self._engine.stage.num_places > 1:
            state_dict = own_part(state_dict, self, self._engine.shadow)
        return super().load_state_dict(state_dict, strict=strict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled whole: it holds process groups."""
        raise InputError(
            "a parallel module can't be copied or pickled: it holds process groups. Save its state_dict() "
            "(torch.distributed.checkpoint) or full_state_dict(), and parallelize the original model again"
        )

    def extra_repr(self) -> str:
        """Return the mesh and the state of planning."""
        return self._engine.describe()

    def _get_name(self) -> str:
        return f"Parallel{self._original}"


def _adapt(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, ParallelModule)
    adapt_state(module, state, prefix, module._engine.stage.stage)


class _Engine:
    """The moving part of a parallel module: its executables by signature."""

    def __init__(self, module: ParallelModule, compiler: Compiler, options: Options, given: Plan | None) -> None:
        self._module = (module,)  # a tuple, so that the module is not its own child
        self._compiler = compiler
        self._options = options
        self._given = given
        self._executables: dict[Signature, Executable | StagedExecutable] = {}
        self._current: Plan | None = given
        self.holding = Holding()
        self.groups: MeshGroups = compiler.groups
        self.stage = compiler.stage
        self.placed = False
        self.places: dict[str, int] = {}
        self._layouts: dict[str, Layout] = {}
        self._calls: KnownCalls | None = None

    @property
    def shadow(self) -> nn.Module:
        """The original without its data."""
        return self._compiler.source.module

    def first(self, call: Call, model: nn.Module, plan: Plan | None, program: Program | None) -> None:
        """Plan for the example if it is not planned yet, then put the parameters where the plan wants them."""
        executable = self._compiler.make(call, self._options, plan, program=program)
        self._remember(call, Situation.of(model), executable)
        self._layouts = _layouts(executable.plan)
        if isinstance(executable, StagedExecutable):
            self.places = dict(executable.places)
        elsewhere = [name for name, place in self.places.items() if place != self.stage.place]
        mirror(model, self._module[0], self.groups, self._layouts, stage=self.stage.stage, elsewhere=elsewhere)
        add_nothing(self._module[0], self.stage)
        self.placed = True

    def current_plan(self) -> Plan:
        """Return the plan in use."""
        if self._current is None:
            raise InputError("nothing is planned yet: call the module once, or give example_inputs to parallelize")
        return self._current

    def describe(self) -> str:
        """Return one line about the mesh and the programs."""
        programs = len(self._executables)
        state = f"{programs} program{'' if programs == 1 else 's'}" if programs else "planned at the first call"
        return f"{self.groups.mesh}, {state}"

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of the module."""
        if self._calls is None:
            self._calls = KnownCalls(self._module[0])
        calls = self._calls
        error: Exception | None = None
        call: Call | None = None
        try:
            call = self._take_apart(calls, args, kwargs)
        except Exception as caught:
            error = caught
        known = call is not None and call.signature in self._executables
        agree = meet(self.stage, call, error, known, self._options.inputs)
        executable = self._executables[call.signature] if call is not None and known else None
        if executable is None or executable.random:
            agree()
            agree = _agreed
        assert call is not None
        executable = executable or self._make(call)
        self._current = executable.plan
        with executable.random_state(self._options.inputs == "local"):
            out = executable.run(calls.parameters(), calls.buffers(), call.leaves, agree)
        return pytree.tree_unflatten(out, executable.program.out_spec)

    def _take_apart(self, calls: KnownCalls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return a call; with stages the module whose modes and flags count has the parameters of all of them."""
        if self.stage.num_places == 1:
            return calls.take_apart(args, kwargs, self.groups.device)
        self._follow()
        return take_apart(self.shadow, args, kwargs, self.groups.device)

    def _follow(self) -> Situation:
        situation = Situation.of(self._module[0])
        situation.put(self.shadow)
        return situation

    def _make(self, call: Call) -> Executable | StagedExecutable:
        module = self._module[0]
        situation = self._follow()
        given = self._given if not self._executables else None
        options = self._options
        if self.placed and given is None:
            options = self._pin_stages(options) if self.places else _pin(options, module)
        executable = self._compiler.make(call, options, given)
        if self.places:
            self._require_places(executable)
        if not self.placed:
            for name, parameter in module.named_parameters():
                lay_out(parameter, executable.plan.layout(name), self.groups)
            self.placed = True
        self._remember(call, situation, executable)
        return executable

    def _wider(self, call: Call, situation: Situation) -> Executable:
        """Return an executable for a call that differentiates the outputs beside the loss too. Collective."""
        with situation.again(self.shadow):
            made = self._compiler.make(call, _pin(self._options, self._module[0]), None, every_output=True)
        if not isinstance(made, Executable):
            raise InputError(
                "a gradient reached an output beside the loss; with all outputs differentiated the call does not fit "
                "memory= at once, and in micro-batches only the loss is: put the term into the loss inside the module, "
                "detach it, or allow more memory"
            )
        self._executables[call.signature] = made
        made.holding = self.holding
        return made

    def _pin_stages(self, options: Options) -> Options:
        """Return the options under which parameters stay on their stages, where they lie."""
        import msgspec

        first = next(iter(self._executables.values())).plan.pipeline
        pinned = {name: layout_name(layout) for name, layout in self._layouts.items() if name in self.places}
        if first is None:
            return msgspec.structs.replace(options, pinned=pinned)
        cuts = first.cuts if first.ranks > 1 else ()
        schedule = first.schedule if first.ranks > 1 else ""
        return msgspec.structs.replace(
            options, pinned=pinned, cuts=cuts, schedule=schedule, micro_batches=first.micro_batches
        )

    def _require_places(self, executable: Executable | StagedExecutable) -> None:
        wanted = executable.places if isinstance(executable, StagedExecutable) else {}
        moved = sorted(name for name, place in self.places.items() if wanted.get(name, place) != place)
        if moved:
            raise PlanError(
                f"for these inputs or this mode {moved[0]} would be needed first on another stage than the one that "
                "keeps it; give cuts= at modules that start their stage in every mode, or parallelize again"
            )

    def _remember(self, call: Call, situation: Situation, executable: Executable | StagedExecutable) -> None:
        self._executables[call.signature] = executable
        self._current = executable.plan
        if isinstance(executable, Executable):
            executable.holding = self.holding
            executable.widen = functools.cache(functools.partial(self._wider, without_data(call), situation))


def _agreed() -> None:
    """Do nothing: the ranks agree already."""


def _layouts(plan: Plan) -> dict[str, Layout]:
    return {name: parse_layout(text) for name, text in plan.parameters.items()}


def _pin(options: Options, module: nn.Module) -> Options:
    import msgspec

    pinned = {
        name: layout_name(from_dtensor(parameter.placements))  # type: ignore[attr-defined]
        for name, parameter in module.named_parameters()
    }
    return msgspec.structs.replace(options, pinned=pinned)


def _option_lines(options: Options) -> list[str]:
    return [f"option {name}: {getattr(options, name)!r}" for name in options.__struct_fields__]


def _check_parameters(plan: Plan, model: nn.Module) -> None:
    names = {name for name, _ in model.named_parameters()}
    missing = sorted(names - set(plan.parameters))
    wrong = [
        name
        for name, parameter in model.named_parameters()
        if name in plan.parameter_shapes and tuple(plan.parameter_shapes[name]) != tuple(parameter.shape)
    ]
    if missing or wrong:
        what = f"has no place for {', '.join(missing[:3])}" if missing else f"has another shape for {wrong[0]}"
        raise PlanError(f"the plan was made for another model: it {what}; make a plan for this model")


def _merge_options(options: Options, plan: Plan) -> Options:
    import msgspec

    for name, default in (("inputs", "global"), ("outputs", "auto")):
        asked, made = getattr(options, name), getattr(plan.options, name)
        if asked not in (default, made):
            raise PlanError(f"the plan was made for {name}={made!r}, but {name}={asked!r} is asked; use one of them")
    if options.memory is not None and plan.memory.total_bytes > options.memory:
        raise PlanError(
            f"the plan needs {plan.memory.total_bytes} bytes a rank, but memory={options.memory} is asked; "
            "raise memory=, or plan again within it"
        )
    if options.constraints and options.constraints != plan.options.constraints:
        raise PlanError(
            f"the plan was made under the constraints {plan.options.constraints}, but {options.constraints} are asked; "
            "leave constraints= out, or plan again under them"
        )
    return msgspec.structs.replace(plan.options, disable=options.disable or plan.options.disable)
