-- A tool that has asked to be left alone, or is down, as all who want to call it have to know; none: all is well.
CREATE TABLE tool_pause (
    tool TEXT PRIMARY KEY,
    category TEXT NOT NULL,
    failures INTEGER NOT NULL,
    started_at TEXT NOT NULL,
    started_boot TEXT NOT NULL,
    started_clock DOUBLE PRECISION NOT NULL,
    until TEXT,
    opener TEXT,
    probe TEXT NOT NULL DEFAULT '',
    probe_epoch INTEGER NOT NULL DEFAULT 0
);
