-- name: birth^
-- When this ledger began: what started earlier may have been recorded in one that was lost.
SELECT born_at FROM ledger;

-- name: node^
SELECT * FROM node WHERE run_id = :run_id AND node_id = :node_id;

-- name: insert_node!
INSERT INTO node (run_id, node_id, logical_attempt, redrives, tool, fingerprint, input)
VALUES (:run_id, :node_id, :logical_attempt, :redrives, :tool, :fingerprint, :input);

-- name: advance_node!
-- The dispatch knows more of the node than this ledger does.
UPDATE node SET tool = :tool, logical_attempt = :logical_attempt, redrives = :redrives, fingerprint = :fingerprint, input = :input
WHERE run_id = :run_id AND node_id = :node_id;

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

-- name: insert_operation!
INSERT INTO operation (operation_id, run_id, node_id, logical_attempt, idempotency_key, tool, fingerprint, input_hash, epoch, scheduled_at)
VALUES (:operation_id, :run_id, :node_id, :logical_attempt, :idempotency_key, :tool, :fingerprint, :input_hash, 0, :scheduled_at);

-- name: see_delivery!
UPDATE operation SET scheduled_at = :scheduled_at WHERE operation_id = :operation_id;

-- name: lease_operation!
UPDATE operation SET epoch = :epoch, owner = :owner, lease_boot = :boot, lease_until = :until
WHERE operation_id = :operation_id;

-- name: renew_lease!
UPDATE operation SET lease_boot = :boot, lease_until = :until
WHERE operation_id = :operation_id AND epoch = :epoch AND owner IS NOT NULL;

-- name: release_lease!
UPDATE operation SET owner = NULL, lease_boot = NULL, lease_until = NULL WHERE operation_id = :operation_id;

-- name: fence_operation!
-- Whoever still holds an earlier epoch changes nothing from here on.
UPDATE operation SET epoch = epoch + 1, owner = NULL, lease_boot = NULL, lease_until = NULL
WHERE operation_id = :operation_id AND epoch <= :epoch;

-- name: adopt_fingerprint!
UPDATE operation SET fingerprint = :fingerprint WHERE operation_id = :operation_id;

-- name: succeed_operation!
UPDATE operation SET result = :result, succeeded_at = :now, owner = NULL, lease_boot = NULL, lease_until = NULL
WHERE operation_id = :operation_id;

-- name: attempts
SELECT * FROM attempt WHERE run_id = :run_id AND node_id = :node_id ORDER BY attempt;

-- name: insert_attempt!
INSERT INTO attempt (run_id, node_id, attempt, operation_id, epoch, worker, delivery, started_at, side_effect, code)
VALUES (:run_id, :node_id, :attempt, :operation_id, :epoch, :worker, :delivery, :started_at, :side_effect, :code);

-- name: end_attempt!
-- What began without a risk (a read) ends without an effect.
UPDATE attempt
SET ended_at = :now, category = :category, code = :code, message = :message, http_status = :http_status,
    side_effect = CASE side_effect WHEN 'NONE' THEN 'NONE' ELSE :side_effect END, next_eligible_at = :next_eligible_at, not_before = :not_before
WHERE operation_id = :operation_id AND epoch = :epoch AND ended_at IS NULL;

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
