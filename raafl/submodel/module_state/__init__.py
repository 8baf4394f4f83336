"""What a module keeps in Python attributes: recorded, restored before each task and each evaluation, refused where it cannot be."""

from raafl.submodel.module_state.state import ModuleState, has_values_beside

__all__ = ["ModuleState", "has_values_beside"]
