-- name: birth^
-- When this ledger began: what started earlier may have been recorded in one that was lost.
SELECT born_at FROM ledger;

-- name: node^
SELECT * FROM node WHERE run_id = :run_id AND node_id = :node_id;

-- name: insert_node^
INSERT INTO node (run_id, node_id, logical_attempt, redrives, tool, fingerprint, input)
VALUES (:run_id, :node_id, :logical_attempt, :redrives, :tool, :fingerprint, :input)
RETURNING *;

-- name: advance_node^
-- The dispatch knows more of the node than this ledger does.
UPDATE node SET tool = :tool, logical_attempt = :logical_attempt, redrives = :redrives, fingerprint = :fingerprint, input = :input
WHERE run_id = :run_id AND node_id = :node_id
RETURNING *;

-- name: cancel_node!
INSERT INTO node (run_id, node_id, logical_attempt, tool, fingerprint, input, cancelled_at, fence)
VALUES (:run_id, :node_id, 1, '', '', 'null', :now, :fence)
ON CONFLICT (run_id, node_id) DO UPDATE
SET cancelled_at = COALESCE(node.cancelled_at, excluded.cancelled_at), fence = excluded.fence
WHERE node.ended IS NULL;

-- name: end_node!
UPDATE node SET ended = :ended, ended_at = :now, output = :output, source = :source
WHERE run_id = :run_id AND node_id = :node_id;

-- name: redrive_node!
UPDATE node
SET logical_attempt = :logical_attempt, fingerprint = :fingerprint, input = :input, approval = :approval,
    redrives = :redrives,
    budget_from = (SELECT COALESCE(MAX(attempt), 0) FROM attempt WHERE run_id = :run_id AND node_id = :node_id)
WHERE run_id = :run_id AND node_id = :node_id;

-- name: record_decision!
UPDATE node SET decisions = :decisions, fence = :fence WHERE run_id = :run_id AND node_id = :node_id;

-- name: operation^
SELECT * FROM operation WHERE operation_id = :operation_id;

-- name: insert_operation^
INSERT INTO operation (operation_id, run_id, node_id, logical_attempt, idempotency_key, tool, fingerprint, input_hash, epoch, scheduled_at)
VALUES (:operation_id, :run_id, :node_id, :logical_attempt, :idempotency_key, :tool, :fingerprint, :input_hash, 0, :scheduled_at)
RETURNING *;

-- name: see_delivery!
UPDATE operation SET scheduled_at = :scheduled_at WHERE operation_id = :operation_id;

-- name: lease_operation!
UPDATE operation SET epoch = :epoch, owner = :owner, lease_boot = :boot, lease_until = :until
WHERE operation_id = :operation_id;

-- name: renew_lease!
-- Only what still runs: once a lease is over, others may have relied on it.
UPDATE operation SET lease_until = :until
WHERE operation_id = :operation_id AND epoch = :epoch AND owner IS NOT NULL AND lease_boot = :boot AND lease_until > :now;

-- name: release_lease!
UPDATE operation SET owner = NULL, lease_boot = NULL, lease_until = NULL WHERE operation_id = :operation_id;

-- name: fence_operation!
-- Whoever still holds an earlier epoch changes nothing from here on.
UPDATE operation SET epoch = epoch + 1, owner = NULL, lease_boot = NULL, lease_until = NULL
WHERE operation_id = :operation_id AND epoch <= :epoch;

-- name: adopt_fingerprint!
UPDATE operation SET fingerprint = :fingerprint WHERE operation_id = :operation_id;

-- name: succeed_operation!
-- If the epoch is the current one, and has no end yet.
UPDATE operation SET result = :result, succeeded_at = :now, owner = NULL, lease_boot = NULL, lease_until = NULL
WHERE operation_id = :operation_id AND epoch = :epoch AND owner IS NOT NULL;

-- name: reconcile_operation!
UPDATE operation SET result = :result, succeeded_at = :now, owner = NULL, lease_boot = NULL, lease_until = NULL
WHERE operation_id = :operation_id;

-- name: attempts
SELECT * FROM attempt WHERE run_id = :run_id AND node_id = :node_id ORDER BY attempt;

-- name: attempt^
SELECT * FROM attempt WHERE operation_id = :operation_id AND epoch = :epoch;

-- name: insert_attempt!
INSERT INTO attempt (run_id, node_id, attempt, operation_id, epoch, worker, delivery, started_at, started_boot, started_clock, side_effect, code)
VALUES (:run_id, :node_id, :attempt, :operation_id, :epoch, :worker, :delivery, :started_at, :started_boot, :started_clock, :side_effect, :code);

-- name: end_attempt!
-- What began without a risk (a read) ends without an effect.
UPDATE attempt
SET ended_at = :now, category = :category, code = :code, message = :message, http_status = :http_status,
    side_effect = CASE side_effect WHEN 'NONE' THEN 'NONE' ELSE :side_effect END, next_eligible_at = :next_eligible_at, not_before = :not_before
WHERE operation_id = :operation_id AND epoch = :epoch AND ended_at IS NULL;

-- name: succeed_attempt!
-- It has ended, and settles what was uncertain before it.
UPDATE attempt
SET settled = :settled,
    ended_at = CASE WHEN epoch = :epoch THEN :now ELSE ended_at END,
    side_effect = CASE WHEN epoch = :epoch AND side_effect <> 'NONE' THEN 'CONFIRMED' ELSE side_effect END
WHERE operation_id = :operation_id AND settled IS NULL AND epoch <= :epoch;

-- name: note_late_answer!
-- The answer of an attempt that was given up: kept for people, it decides nothing.
UPDATE attempt SET ended_at = :now, code = :code, message = :message
WHERE operation_id = :operation_id AND epoch = :epoch AND ended_at IS NULL;

-- name: settle_attempts!
UPDATE attempt SET settled = :settled
WHERE operation_id = :operation_id AND settled IS NULL AND epoch <= :epoch;

-- name: confirm_attempts!
UPDATE attempt SET side_effect = 'CONFIRMED', result_unusable = 1
WHERE operation_id = :operation_id AND settled IS NULL AND side_effect <> 'NONE';

-- name: accept_risk!
UPDATE attempt SET accepted_by = :decision_id
WHERE operation_id = :operation_id AND settled IS NULL AND accepted_by IS NULL;

-- name: allow_repetition!
-- A result that nobody could use is not asked for again by itself; a person has asked for it.
UPDATE attempt SET result_unusable = 0 WHERE operation_id = :operation_id AND settled IS NULL;

-- name: pause^
-- With the lease of its probe, if that still has it.
SELECT p.*, o.owner, o.lease_boot, o.lease_until
FROM tool_pause p
LEFT JOIN operation o ON o.operation_id = p.probe AND o.epoch = p.probe_epoch
WHERE p.tool = :tool;

-- name: begin_probe!
-- If nobody else has meanwhile.
UPDATE tool_pause SET probe = :operation_id, probe_epoch = :epoch
WHERE tool = :tool AND until = :until AND probe = :earlier AND probe_epoch = :earlier_epoch;

-- name: end_probe!
UPDATE tool_pause SET probe = '', probe_epoch = 0 WHERE probe = :operation_id AND probe_epoch = :epoch;

-- name: count_failure^
INSERT INTO tool_pause (tool, category, failures, started_at, started_boot, started_clock)
VALUES (:tool, :category, 1, :started_at, :started_boot, :started_clock)
ON CONFLICT (tool) DO UPDATE SET failures = tool_pause.failures + 1
RETURNING *;

-- name: open_pause!
UPDATE tool_pause
SET category = :category, until = :until, opener = :operation_id, started_at = :started_at, started_boot = :started_boot, started_clock = :started_clock
WHERE tool = :tool;

-- name: lift_pause!
DELETE FROM tool_pause
WHERE tool = (SELECT tool FROM operation WHERE operation_id = :operation_id)
    AND (until IS NULL OR (probe = :operation_id AND probe_epoch = :epoch));

-- name: take_turn^
-- If it is not too far off; the first of all calls begins at once. What is beyond any turn is of a clock that was set back.
INSERT INTO tool_turn (tool, boot, free_at) VALUES (:tool, :boot, :after_now)
ON CONFLICT (tool) DO UPDATE
SET boot = :boot,
    free_at = CASE WHEN tool_turn.boot = :boot AND tool_turn.free_at BETWEEN :now AND :latest THEN tool_turn.free_at + :interval ELSE :after_now END
WHERE tool_turn.boot <> :boot OR tool_turn.free_at <= :latest OR tool_turn.free_at > :beyond
RETURNING free_at;

-- name: turn^
SELECT free_at FROM tool_turn WHERE tool = :tool;

-- name: unsettled
-- Of the operation that a node is at; an older one was left behind by a person's decision.
SELECT DISTINCT a.operation_id, a.run_id, a.node_id, o.tool
FROM attempt a
JOIN operation o ON o.operation_id = a.operation_id
JOIN node n ON n.run_id = a.run_id AND n.node_id = a.node_id AND n.logical_attempt = o.logical_attempt
WHERE a.settled IS NULL AND a.side_effect <> 'NONE' AND n.ended IS NULL AND a.operation_id > :after
ORDER BY a.operation_id
LIMIT :limit;

-- name: operations
SELECT o.operation_id, o.run_id, o.node_id, o.tool, o.owner, o.lease_boot, o.lease_until, o.succeeded_at,
    COUNT(a.attempt) AS attempts, MIN(a.started_at) AS first_sent_at, MAX(a.started_at) AS last_sent_at,
    MAX(CASE WHEN a.settled IS NOT NULL THEN 0 WHEN a.side_effect = 'CONFIRMED' THEN 2 WHEN a.side_effect = 'POSSIBLE' THEN 1 ELSE 0 END) AS risk
FROM operation o
LEFT JOIN attempt a ON a.operation_id = o.operation_id
WHERE o.operation_id > :after AND (CAST(:run_id AS TEXT) IS NULL OR o.run_id = :run_id)
    AND CASE WHEN o.succeeded_at IS NULL THEN 0 ELSE 1 END = :succeeded
GROUP BY o.operation_id, o.run_id, o.node_id, o.tool, o.owner, o.lease_boot, o.lease_until, o.succeeded_at
ORDER BY o.operation_id
LIMIT :limit;

-- name: ended_runs
SELECT n.run_id
FROM node n
WHERE n.run_id > :after
GROUP BY n.run_id
HAVING MAX(CASE WHEN COALESCE(n.ended_at, n.cancelled_at) < :before THEN 0 ELSE 1 END) = 0
    AND NOT EXISTS (SELECT 1 FROM attempt a WHERE a.run_id = n.run_id AND a.settled IS NULL AND a.side_effect <> 'NONE')
ORDER BY n.run_id
LIMIT :limit;

-- name: ended_run^
-- The same of one run.
SELECT n.run_id
FROM node n
WHERE n.run_id = :run_id
GROUP BY n.run_id
HAVING MAX(CASE WHEN COALESCE(n.ended_at, n.cancelled_at) < :before THEN 0 ELSE 1 END) = 0
    AND NOT EXISTS (SELECT 1 FROM attempt a WHERE a.run_id = n.run_id AND a.settled IS NULL AND a.side_effect <> 'NONE');

-- name: node_ids
SELECT node_id FROM node WHERE run_id = :run_id ORDER BY node_id;

-- name: size_of_node^
SELECT (SELECT COUNT(*) FROM operation WHERE run_id = :run_id AND node_id = :node_id) AS operations,
    (SELECT COUNT(*) FROM attempt WHERE run_id = :run_id AND node_id = :node_id) AS attempts;

-- name: forget_attempts!
DELETE FROM attempt WHERE run_id = :run_id AND node_id = :node_id;

-- name: forget_operations!
DELETE FROM operation WHERE run_id = :run_id AND node_id = :node_id;

-- name: forget_node!
DELETE FROM node WHERE run_id = :run_id AND node_id = :node_id;
