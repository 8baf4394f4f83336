"""What travels in the place of tensors: compressors, the plan of a run, and streams that remember what was lost."""
