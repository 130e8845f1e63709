"""Benchmark of an OpenAI-compatible server: load, replay, metrics, report, figure.

Speaks HTTP only and knows nothing of the engines, so that any server is measured alike.
"""
