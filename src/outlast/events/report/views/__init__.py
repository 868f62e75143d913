"""The report as text, JSON, an HTML page, and a trace."""
