"""Token accounting and cross entropy."""
