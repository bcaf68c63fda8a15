-- By the clock that leases run by: how long ago an attempt started, whatever the wall clock has done since.
ALTER TABLE attempt ADD COLUMN started_boot TEXT;
ALTER TABLE attempt ADD COLUMN started_clock DOUBLE PRECISION;
-- What Sweep looks for every minute, however much has been settled.
CREATE INDEX attempt_unsettled ON attempt (operation_id) WHERE settled IS NULL AND side_effect <> 'NONE';
