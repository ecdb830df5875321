"""What is done to a module: tensor, context, activation checkpointing, compile, data; one file a step."""
