"""autopar: a compiler that splits an ordinary PyTorch model over a device mesh.

``autopar.parallelize(model, mesh)`` returns the same model, running on all of the mesh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_WHERE = {
    "parallelize": "api",
    "plan": "api",
    "verify": "verification",
    "Cluster": "cluster",
    "Mesh": "mesh",
    "Plan": "plans",
    "OptimizerBytes": "passes.cost.memory",
    "AutoparError": "errors",
    "MeshError": "errors",
    "OptionError": "errors",
    "CaptureError": "errors",
    "RuleError": "errors",
    "ConstraintError": "errors",
    "InfeasibleError": "errors",
    "PlanError": "errors",
    "LoweringError": "errors",
    "MismatchError": "errors",
    "InputError": "errors",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _WHERE:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(import_module(f"autopar.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from autopar.api import parallelize as parallelize
    from autopar.api import plan as plan
    from autopar.cluster import Cluster as Cluster
    from autopar.errors import AutoparError as AutoparError
    from autopar.errors import CaptureError as CaptureError
    from autopar.errors import ConstraintError as ConstraintError
    from autopar.errors import InfeasibleError as InfeasibleError
    from autopar.errors import InputError as InputError
    from autopar.errors import LoweringError as LoweringError
    from autopar.errors import MeshError as MeshError
    from autopar.errors import MismatchError as MismatchError
    from autopar.errors import OptionError as OptionError
    from autopar.errors import PlanError as PlanError
    from autopar.errors import RuleError as RuleError
    from autopar.mesh import Mesh as Mesh
    from autopar.passes.cost.memory import OptimizerBytes as OptimizerBytes
    from autopar.plans import Plan as Plan
    from autopar.verification import verify as verify
