"""Reaping children, ending helpers, killing orphans."""
