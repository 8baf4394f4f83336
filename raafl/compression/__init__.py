"""Compress tensors on the wire: compressors, a run's compression plan, and codecs with error feedback."""
