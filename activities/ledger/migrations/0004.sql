-- When a tool with a rate may be called next, whichever worker calls it: in seconds of the ledger's clock since that boot.
CREATE TABLE tool_turn (
    tool TEXT PRIMARY KEY,
    boot TEXT NOT NULL,
    free_at DOUBLE PRECISION NOT NULL
);
