"""Record a module's Python attributes, restore them before each task and evaluation, refuse those that cannot be restored."""

from raafl.submodel.module_state.state import ModuleState, has_values_beside

__all__ = ["ModuleState", "has_values_beside"]
