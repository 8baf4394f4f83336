"""What is known of the blocks of other packages' transformers: one module for each family, none imports its package."""

from raafl.submodel.families import bert, llama, vit

__all__ = ["bert", "llama", "vit"]
