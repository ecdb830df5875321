"""Reading and writing weights: Hugging Face folders and sharded checkpoints."""
