CREATE TABLE ledger (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    born_at TEXT NOT NULL
);

CREATE TABLE node (
    run_id TEXT NOT NULL,
    node_id TEXT NOT NULL,
    logical_attempt INTEGER NOT NULL,
    tool TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    input TEXT NOT NULL,
    approval TEXT NOT NULL DEFAULT 'null',
    redrives INTEGER NOT NULL DEFAULT 0,
    budget_from INTEGER NOT NULL DEFAULT 0,
    decisions TEXT NOT NULL DEFAULT '[]',
    fence TEXT,
    cancelled_at TEXT,
    ended TEXT,
    ended_at TEXT,
    output TEXT,
    source TEXT,
    PRIMARY KEY (run_id, node_id)
);

CREATE TABLE operation (
    operation_id TEXT PRIMARY KEY,
    run_id TEXT NOT NULL,
    node_id TEXT NOT NULL,
    logical_attempt INTEGER NOT NULL,
    idempotency_key TEXT NOT NULL,
    tool TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    input_hash TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    owner TEXT,
    lease_boot TEXT,
    lease_until DOUBLE PRECISION,
    scheduled_at TEXT NOT NULL,
    succeeded_at TEXT,
    result TEXT,
    FOREIGN KEY (run_id, node_id) REFERENCES node
);

CREATE TABLE attempt (
    run_id TEXT NOT NULL,
    node_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    operation_id TEXT NOT NULL REFERENCES operation,
    epoch INTEGER NOT NULL,
    worker TEXT NOT NULL,
    delivery TEXT NOT NULL,
    started_at TEXT NOT NULL,
    ended_at TEXT,
    category TEXT,
    code TEXT,
    message TEXT,
    http_status INTEGER,
    side_effect TEXT NOT NULL,
    next_eligible_at TEXT,
    not_before TEXT,
    settled TEXT,
    accepted_by TEXT,
    result_unusable INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, node_id, attempt)
);
CREATE INDEX attempt_operation ON attempt (operation_id);
