"""The token side: token ids in, token ids out. Knows no text, JSON, or environment."""
