"""freda: forward-free block-diffusion language models that refine their own drafts."""

__version__ = "0.1.0"
