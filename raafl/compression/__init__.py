"""Compress what travels: compressors, the plan of a run, and codecs that remember what was lost."""
