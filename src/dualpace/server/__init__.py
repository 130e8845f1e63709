"""The frontend process: OpenAI API, text, streams, the journal of live requests, metrics.

Knows the engines by their messages only.
"""
