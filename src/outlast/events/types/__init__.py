"""The types of events, by subject: a new one belongs to the module of its subject.

`outlast.events` imports all of them, and so registers them: import them from there.
"""
