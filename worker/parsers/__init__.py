"""Model output -> content, reasoning and tool calls. One format a file; `registry` picks the format."""
