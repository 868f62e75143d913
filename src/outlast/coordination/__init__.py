"""How processes agree: the store, the ledger of lost members, barriers, views."""
