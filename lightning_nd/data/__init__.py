"""Chat, completion and text sources, sampling and the data module."""
