"""The text side: jobs, the OpenAI protocol, tokens <-> text. Never imports torch or engine internals."""

VERSION = "0.1.0"
