"""What a round must not show: another result, an orphan, a leak, something left over."""
