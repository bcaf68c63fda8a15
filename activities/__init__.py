"""Everything that touches the world: the catalog, the tools, the ledger, the alert."""
