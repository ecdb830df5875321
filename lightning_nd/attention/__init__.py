"""Context-parallel attention: layout, plan, transport, local kernels."""
