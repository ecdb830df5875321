"""LightningModules that fine-tune causal language models."""
