"""Kimi Delta Attention (KDA) as a context-parallel operator for PyTorch."""
