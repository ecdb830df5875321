"""N-dimensional parallel training of language models for PyTorch Lightning."""
