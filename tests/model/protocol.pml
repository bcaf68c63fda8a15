/*
 * Redrive's protocol for one node: who may send, whose commit counts, what an answer means, who is told.
 *
 * Every step of the code that is one transaction, one call or one workflow decision is one atomic step here, under the
 * name that it has there. Between two steps anything may happen: the worker crashes or is frozen, its lease runs out, the
 * broker redelivers, a person decides, the run is cancelled, the node's workflow is reset. docs/protocol.md explains it.
 *
 *   -DKIND=READ|KEY|WINDOW|RECON|BARE   what the tool declares (WINDOW: dedupes by key, and its window ends)
 *   -DGAP                               the last check and the first byte are two steps, as they are by nature
 *   -DREACH=...                         fails when that state is reached: the model is not vacuous
 *   -DNO_...                            one rule of the protocol is taken out
 */
#define READ   1
#define KEY    2
#define WINDOW 3
#define RECON  4
#define BARE   5
#ifndef KIND
#define KIND RECON
#endif

/* The bounds: docs/protocol.md says why they are enough. */
#ifndef DELIVERIES
#define DELIVERIES 2            /* of call_tool, before a redrive or a reset; each of these brings one more */
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 3              /* rows in all */
#endif
#ifndef BUDGET
#define BUDGET 2                /* attempts before a person is asked, afresh from each redrive */
#endif
#ifndef REDRIVES
#define REDRIVES 1
#endif
#ifndef CANCELS
#define CANCELS 0
#endif
#ifndef RESETS
#define RESETS 0
#endif

#define DEDUPES  (KIND == READ || KIND == KEY || (KIND == WINDOW && !window_over))
#define ASKABLE  (KIND == RECON)

/* Reachability: REACHED(name) is an error when -DREACH=name. */
#define SUCCESS       1
#define RECONCILED    2
#define DEAD_LETTER   3
#define REDRIVEN      4
#define NEW_OPERATION 5
#define RISK_TAKEN    6
#define SECOND_EFFECT 7
#define RESENT        8
#define FENCED        9
#define CANCELLED_END 10
#define DISCARDED_END 11
#define RESOLVED_END  12
#define RESET_MOVED   13
#define STALE_SEEN    14
#define LEASE_LOST    15
#define OUTLIVED      16
#define REPLAYED      17
#define EVIDENCE      18
#ifndef REACH
#define REACH 0
#endif
#define REACHED(what) assert(REACH != what)

/* ---- the rules that can be taken out --------------------------------------------------------------------------- */

/* Store.claim: a cancelled node gets nothing */
#ifdef NO_CANCEL_CHECK
#define CANCEL_SEEN false
#else
#define CANCEL_SEEN n_cancelled
#endif

/* Store.claim: a delivery that was overtaken gets nothing */
#ifdef NO_STALE_FENCE
#define OVERTAKEN(time, op) false
#else
#define OVERTAKEN(time, op) (time < n_fence || time < o_seen[op])
#endif

/* Store._holds: whose commit counts */
#ifdef NO_FENCING
#define _holds(me) true
#else
#define _holds(me) (o_epoch[w_logical[me]] == w_epoch[me] && o_owner[w_logical[me]] != 0)
#endif

/* Store.renew, without NO_END_OF_LEASE: a lease that has run out stays so */

/* _Entry._check: the last look before the first byte */
#ifdef NO_LEASE_CHECK
#define _check(me) true
#else
#define _check(me) w_held[me]
#endif

/* ReconcileOperation._ask: the horizon is the time after which no request of an attempt is on its way any more */
#if ATTEMPTS > 3
#define SOMETHING_FLIES (wire[0] == FLYING || wire[1] == FLYING || wire[2] == FLYING || wire[3] == FLYING)
#else
#define SOMETHING_FLIES (wire[0] == FLYING || wire[1] == FLYING || wire[2] == FLYING)
#endif
#ifdef NO_HORIZON
#define HORIZON_OVER(op) true
#else
#define HORIZON_OVER(op) (!o_lease[op] && !SOMETHING_FLIES)
#endif

/* Store.settle_committed: of the operation that the node is at */
#ifdef NO_CURRENT_OPERATION
#define CURRENT(op) true
#else
#define CURRENT(op) (n_logical == op)
#endif

/* ReconcileOperation._committed: it answers what the ledger has taken */
#ifdef NO_END_CHECK
#define ASKS_THE_LEDGER false
#else
#define ASKS_THE_LEDGER true
#endif

/* Node._cancel, Node._failed: the ledger says "cancelled" before the node acts on it, and what it says then is what counts */
#ifdef NO_CANCEL_FIRST
#define CANCEL_FIRST false
#else
#define CANCEL_FIRST true
#endif

/* Store.decide: of what the person has seen */
#ifdef NO_EVIDENCE_CHECK
#define OUTDATED false
#else
#define OUTDATED (a_count != l_seen)
#endif

/* Decisions._redrive: only an override accepts a risk */
#ifdef NO_OVERRIDE_NEEDED
#define ACCEPTED(overridden) true
#else
#define ACCEPTED(overridden) overridden
#endif

/* ---- the ledger: activities/ledger ---------------------------------------------------------------------------- */

#define NO_END    0
#define SUCCEEDED 1
#define RESOLVED  2
#define DISCARDED 3
#define CANCELLED 4

/* the node's row */
byte n_logical, n_redrives, n_fence, n_budget_from, n_ended;
bool n_cancelled;

/* the operations' rows, by logical attempt; o_owner is the worker that holds the epoch (0: nobody) */
byte o_epoch[2], o_owner[2], o_seen[2];
bool o_lease[2];

/* the attempts' rows; a_risk: side effect is not NONE */
byte a_count;
byte a_op[ATTEMPTS], a_epoch[ATTEMPTS];
bool a_risk[ATTEMPTS], a_unknown[ATTEMPTS], a_settled[ATTEMPTS], a_accepted[ATTEMPTS];

/* ---- the tool and the wire -------------------------------------------------------------------------------------- */

#define QUIET    0              /* not sent yet, or nothing can come of it any more */
#define FLYING   1              /* it may take effect */
#define LANDED   2              /* it took effect, and its answer is on its way */
#define TURNED   3              /* it never will, and the answer that says so is on its way */
byte wire[ATTEMPTS];
byte effects[2];
bool window_over;

/* ---- the broker: one call_tool activity of the node at a time ---------------------------------------------------- */

#define NO_CALL 0
#define QUEUED  1
#define STARTED 2
#define DONE    3
byte now;                       /* the scheduled time of the newest delivery */
byte deliveries = DELIVERIES;   /* that may still be made */
byte call_state, call_time, call_result, call_logical, call_redrives;
bool call_cancel;

/* what a delivery ends with */
#define NOTHING       0
#define OK            1
#define WAS_DISCARDED 2
#define WAS_CANCELLED 3
#define MOVED         4
#define UNKNOWN       5         /* for good, of UNKNOWN_SIDE_EFFECT */
#define OTHER         6         /* for good, of any other category */
#define AGAIN         7         /* the server is to deliver it again */

/* ---- the workers ------------------------------------------------------------------------------------------------ */

#define IDLE      0
#define CLAIMING  1
#define DESPITE   2
#define SENDING   3
#define WRITING   4
#define WAITING   5
#define ANSWERING 6
byte w_at[2], w_time[2], w_logical[2], w_redrives[2], w_despite[2], w_epoch[2], w_attempt[2], w_result[2];
bool w_held[2];                 /* it holds its lease, as it sees it */
bool w_late[2];                 /* its dispatch's deadline has passed */

/* ---- the workflows ----------------------------------------------------------------------------------------------- */

#define START     0
#define CALLING   1
#define FAILED    2
#define ASKING    3
#define GATHERING 4
#define HANDING   5
#define PARKED    6
#define SETTLING  7
#define ASKING_C  8
#define HANDING_C 9
#define PARKED_C  10
#define ENDED     11
byte d_at, d_logical, d_redrives, d_end, d_settled;
bool d_cancelling, d_unknown, d_evidence;

bool l_open, l_side;            /* the dead letter, and the side effect that it shows */
byte l_redrives, l_seen;        /* what it has last seen: redrives, attempts */

/* ---- reconcile --------------------------------------------------------------------------------------------------- */

#define VIEWING   1
#define GETTING   2
#define ABSENT    3
#define COMMITTED 4
#define NO_ANSWER 5
#define NOBODY    0
#define FOR_NODE  1
#define FOR_ENTRY 2
byte r_at, r_for, r_logical, r_epoch, r_answer;
bool r_over;                    /* the horizon is over, and no lease runs */

/* ---- what only the checker knows ---------------------------------------------------------------------------------- */

byte risks;                     /* overrides that a person has had accepted */
bool known;                     /* a person decided knowing that an effect is possible */
bool run_cancelling;
byte i;                         /* always 0 between steps */
bool found;                     /* always false between steps */

#define EFFECTS (effects[0] + effects[1])

/* The promises that hold in every state; called where one could be broken. */
inline promises() {
    /* 1. once, but for the risks that a person has taken */
    assert(EFFECTS <= 1 + risks);
    /* 2. an effect behind an end is known to whoever ended it */
    assert(!(n_ended == DISCARDED || n_ended == RESOLVED) || EFFECTS == 0 || known);
    /* 3. cancelled means: nothing has happened, or somebody is told */
    assert(!(d_at == ENDED && d_end == CANCELLED) || EFFECTS == 0 || n_ended == SUCCEEDED || known || l_open && l_side);
    assert(!(d_at == ENDED && d_end == SUCCEEDED) || n_ended == SUCCEEDED || n_ended == RESOLVED);
}

/* ==== the ledger's transactions ==================================================================================== */

/* What NodeView says of the current operation: attempts that nothing has settled. */
inline side_effect(answer) {
    for (i : 0 .. ATTEMPTS - 1) {
        if
        :: i < a_count && a_op[i] == n_logical && a_risk[i] && !a_settled[i] -> answer = true
        :: else
        fi
    }
    i = 0;
}

/* Store._end_node: an end is final. */
inline _end_node(end) {
    assert(n_ended == NO_END);
    n_ended = end;
}

/* queries.sql, settle_attempts. */
inline settle_attempts(op, epoch) {
    for (i : 0 .. ATTEMPTS - 1) {
        if
        :: i < a_count && a_op[i] == op && a_epoch[i] <= epoch -> a_settled[i] = true
        :: else
        fi
    }
    i = 0;
}

/* queries.sql, fence_operation. */
inline fence_operation(op) {
    o_epoch[op] = o_epoch[op] + 1;
    o_owner[op] = 0;
    o_lease[op] = false;
}

/* store.py, _spent: a bound instead of a budget for each category. */
inline _spent(op, answer) {
    if
    :: a_count > n_budget_from && a_op[a_count - 1] == op && (a_count - n_budget_from >= BUDGET || a_count == ATTEMPTS) ->
        answer = (a_unknown[a_count - 1] -> UNKNOWN : OTHER)
    :: a_count == ATTEMPTS && !(a_count > n_budget_from && a_op[a_count - 1] == op) -> answer = OTHER
    :: else
    fi
}

/* Store._grant: the lease, and the attempt's row with its side effect as it would be if the process died now. */
inline _grant(me, op) {
    assert(n_ended == NO_END && !n_cancelled);
    /* 5. what a newer delivery, a decision or a cancel has overtaken is not sent */
    assert(w_time[me] >= o_seen[op] && w_time[me] >= n_fence);
    o_epoch[op] = o_epoch[op] + 1;
    o_owner[op] = me + 1;
    o_lease[op] = true;
    w_epoch[me] = o_epoch[op];
    w_attempt[me] = a_count;
    w_held[me] = true;
    a_op[a_count] = op;
    a_epoch[a_count] = o_epoch[op];
#ifndef NO_PRESEND_COMMIT
    a_risk[a_count] = (KIND != READ);
#endif
    if
    :: a_count > 0 && a_op[a_count - 1] == op && !n_redrives -> REACHED(RESENT)
    :: else
    fi;
    a_count++;
}


/* Store.claim: the order of the questions is the code's. */
inline claim(me) {
    byte op;
    byte spent;
    op = w_logical[me];
    if
    :: n_ended != NO_END ->
        REACHED(REPLAYED);
        answer(me, (n_ended == DISCARDED -> WAS_DISCARDED : OK))
    :: else ->
        found = (w_logical[me] < n_logical || w_redrives[me] < n_redrives);
        if
        :: found -> REACHED(RESET_MOVED); answer(me, MOVED)
        :: !found && CANCEL_SEEN -> answer(me, WAS_CANCELLED)
        :: !found && !CANCEL_SEEN && OVERTAKEN(w_time[me], op) ->
            REACHED(STALE_SEEN); answer(me, AGAIN)
        :: else ->
            if
            :: w_time[me] > o_seen[op] -> o_seen[op] = w_time[me]
            :: else
            fi;
            spent = NOTHING;
            found = false;
            _spent(op, spent);
            for (i : 0 .. ATTEMPTS - 1) {
                if
                :: i < a_count && a_op[i] == op && a_risk[i] && !a_settled[i] && !a_accepted[i] &&
                        a_epoch[i] > w_despite[me] -> found = true
                :: else
                fi
            }
            i = 0;
            if
            :: o_lease[op] -> answer(me, AGAIN)                        /* Busy */
            :: !o_lease[op] && spent -> answer(me, spent)              /* Spent */
            :: !o_lease[op] && !spent && found ->                                               /* Unsettled */
                if
                :: DEDUPES && w_at[me] == CLAIMING -> w_despite[me] = o_epoch[op]; w_at[me] = DESPITE
                :: else -> answer(me, UNKNOWN)
                fi
            :: else ->                                                                          /* Granted */
                _grant(me, op);
                w_at[me] = SENDING
            fi;
            spent = NOTHING
        fi;
        found = false
    fi;
    op = 0;
}

/* 4. a commit that is taken is the newest epoch's, and nobody has settled or decided over it */
inline fenced_properly(me) {
    assert(o_epoch[w_logical[me]] == w_epoch[me] && o_owner[w_logical[me]] == me + 1);
}

/* Store.succeed. */
inline succeed(me) {
    if
    :: _holds(me) ->
        fenced_properly(me);
        a_risk[w_attempt[me]] = (KIND != READ);
        settle_attempts(w_logical[me], w_epoch[me]);
        o_owner[w_logical[me]] = 0;
        o_lease[w_logical[me]] = false;
        _end_node(SUCCEEDED);
        w_result[me] = OK
    :: else -> REACHED(FENCED); w_result[me] = AGAIN
    fi
}

/* Store.fail. */
inline fail(me, possible, result) {
    if
    :: _holds(me) ->
        fenced_properly(me);
        a_risk[w_attempt[me]] = (KIND != READ) && possible;
        a_unknown[w_attempt[me]] = (result == UNKNOWN);
        o_owner[w_logical[me]] = 0;
        o_lease[w_logical[me]] = false;
        w_result[me] = result
    :: else -> REACHED(FENCED); w_result[me] = AGAIN
    fi
}

/* Store.settle_absent. */
inline settle_absent(op, epoch) {
    settle_attempts(op, epoch);
    if
    :: o_epoch[op] <= epoch -> fence_operation(op)
    :: else
    fi
}

/* Store.settle_committed: it happened, whatever operation the node is at by now; it ends the node only if it is that one. */
inline settle_committed(op, epoch, taken) {
    if
    :: n_ended == NO_END ->
        settle_attempts(op, epoch);
        fence_operation(op);
        if
        :: CURRENT(op) ->
            REACHED(RECONCILED);
            assert(n_logical == op);            /* the node's result is its current operation's */
            _end_node(SUCCEEDED);
            taken = true
        :: else
        fi
    :: else
    fi
}

/* Store.cancel. */
inline ledger_cancel() {
    if
    :: n_ended == NO_END -> n_cancelled = true; n_fence = now + 1
    :: else
    fi
}

/* ==== activities/call_tool.py ====================================================================================== */

/* The activity's completion reaches the server only if it is of the delivery that the server waits for. */
inline answer(me, result) {
    if
    :: call_state == STARTED && call_time == w_time[me] && result == AGAIN && deliveries > 0 && !call_cancel ->
        deliveries--;
        now++;
        call_time = now;
        call_state = QUEUED
    :: call_state == STARTED && call_time == w_time[me] && !(result == AGAIN && deliveries > 0 && !call_cancel) ->
        call_result = (result == AGAIN -> OTHER : result);
        call_state = DONE;
        if
        :: result == MOVED -> call_logical = n_logical; call_redrives = n_redrives
        :: else
        fi
    :: else
    fi;
    forget(me)
}

inline forget(me) {
    w_at[me] = IDLE; w_time[me] = 0; w_logical[me] = 0; w_redrives[me] = 0; w_despite[me] = 0; w_epoch[me] = 0;
    w_attempt[me] = 0; w_result[me] = NOTHING; w_held[me] = false; w_late[me] = false
}

/* Nobody listens to what comes back on the wire any more. */
inline quieten(me) {
    if
    :: w_at[me] == WAITING && wire[w_attempt[me]] != FLYING -> wire[w_attempt[me]] = QUIET
    :: else
    fi
}

/* Committed, and to be answered: nothing else of it is needed any more. */
inline committed(me) {
    w_at[me] = (call_state == STARTED && call_time == w_time[me] -> ANSWERING : IDLE);
    w_time[me] = (w_at[me] == IDLE -> 0 : w_time[me]);
    w_result[me] = (w_at[me] == IDLE -> NOTHING : w_result[me]); w_logical[me] = 0; w_redrives[me] = 0; w_despite[me] = 0; w_epoch[me] = 0;
    w_attempt[me] = 0; w_held[me] = false; w_late[me] = false
}

inline send(me) {
    wire[w_attempt[me]] = FLYING; w_held[me] = false; w_at[me] = WAITING
}

active [2] proctype Worker() {
    byte me;
    me = _pid;
end:
    do
    /* the workers are alike: the second takes a delivery only while the first is at work */
    :: d_step { w_at[me] == IDLE && call_state == QUEUED && (me == 0 || w_at[0] != IDLE) ->
        call_state = STARTED;
        w_time[me] = call_time;
        w_logical[me] = d_logical;
        w_redrives[me] = d_redrives;
        w_at[me] = CLAIMING }
    /* _Entry._claim */
    :: d_step { w_at[me] == CLAIMING || w_at[me] == DESPITE -> claim(me) }
    /* _Entry._no_attempt, twenty times in a row: no slot, or a ledger that is away */
    :: d_step { w_at[me] == CLAIMING && call_state == STARTED && call_time == w_time[me] -> answer(me, OTHER) }
    /* _Entry._send, with its last look at the lease; _refusal: nothing is sent past the deadline */
#ifdef GAP
    :: d_step { w_at[me] == SENDING && !w_late[me] && _check(me) -> w_at[me] = WRITING }
    :: d_step { w_at[me] == WRITING -> send(me) }
#else
    :: d_step { w_at[me] == SENDING && !w_late[me] && _check(me) -> send(me) }
#endif
    /* What an answer means, and Store.succeed, Store.fail: from when it is known to when it is committed nothing of
       it changes, so that this is one step. The first: NotSentError, or no connection. */
    :: d_step { w_at[me] == SENDING ->
        if
        :: !w_held[me] -> REACHED(LEASE_LOST)
        :: else
        fi;
        fail(me, false, AGAIN); committed(me) }
    :: d_step { w_at[me] == WAITING && wire[w_attempt[me]] == LANDED -> quieten(me); succeed(me); committed(me) }
    :: d_step { w_at[me] == WAITING && wire[w_attempt[me]] == TURNED -> quieten(me); fail(me, false, AGAIN); committed(me) }
    :: d_step { w_at[me] == WAITING && wire[w_attempt[me]] == TURNED -> quieten(me); fail(me, false, OTHER); committed(me) }
    :: d_step { w_at[me] == WAITING -> quieten(me); fail(me, true, (DEDUPES -> AGAIN : UNKNOWN)); committed(me) }
    :: d_step { w_at[me] == ANSWERING -> answer(me, w_result[me]) }
#ifdef NO_END_OF_LEASE
    /* _Entry.keep_lease: elsewhere, a lease that is renewed in time is one that has not run out yet */
    :: d_step { w_at[me] == SENDING && o_epoch[w_logical[me]] == w_epoch[me] && o_owner[w_logical[me]] != 0 ->
        o_lease[w_logical[me]] = true; w_held[me] = true }
#endif
    /* kill -9 */
    :: d_step { w_at[me] == SENDING || w_at[me] == WRITING || w_at[me] == WAITING || w_at[me] == ANSWERING ->
        quieten(me); forget(me) }
    od
}

/* ==== time, the wire, the server ================================================================================== */

#define AWAITED(a) (w_at[0] == WAITING && w_attempt[0] == a || w_at[1] == WAITING && w_attempt[1] == a)

inline lapse(op) {
    for (i : 0 .. 1) {
        if
        :: o_owner[op] == i + 1 && w_logical[i] == op && w_epoch[i] == o_epoch[op] -> w_held[i] = false
        :: else
        fi
    }
    i = 0;
    o_lease[op] = false
}

inline lands(a) {
    if
    :: KIND == READ
    :: KIND != READ && (KIND == KEY || KIND == WINDOW && !window_over) && effects[a_op[a]] > 0
    :: else ->
        effects[a_op[a]] = effects[a_op[a]] + 1;
        if
        :: EFFECTS > 1 -> REACHED(SECOND_EFFECT)
        :: else
        fi
    fi;
    wire[a] = (AWAITED(a) -> LANDED : QUIET);
    promises()
}

inline turns(a) { wire[a] = (AWAITED(a) -> TURNED : QUIET) }

active proctype World() {
end:
    do
    /* a lease runs out, for the ledger and for its owner, whose clock never grants it longer */
    :: d_step { o_lease[0] -> lapse(0) }
    :: d_step { o_lease[1] -> lapse(1) }
    /* a request takes effect, soon or late, or never will */
    :: d_step { wire[0] == FLYING -> lands(0) }
    :: d_step { wire[1] == FLYING -> lands(1) }
    :: d_step { wire[2] == FLYING -> lands(2) }
    :: d_step { wire[0] == FLYING -> turns(0) }
    :: d_step { wire[1] == FLYING -> turns(1) }
    :: d_step { wire[2] == FLYING -> turns(2) }
#if ATTEMPTS > 3
    :: d_step { wire[3] == FLYING -> lands(3) }
    :: d_step { wire[3] == FLYING -> turns(3) }
#endif
#if KIND == WINDOW
    /* The window is longer than any attempt takes: none is under way when it ends. */
    :: d_step { !window_over && a_count > 0 && !SOMETHING_FLIES &&
            w_at[0] != DESPITE && w_at[0] != SENDING && w_at[0] != WRITING &&
            w_at[1] != DESPITE && w_at[1] != SENDING && w_at[1] != WRITING -> window_over = true }
#endif
    /* the heartbeat stops, or the completion is lost: the server delivers again, or its time for the call is up */
    :: d_step { call_state == STARTED ->
        if
        :: deliveries > 0 && !call_cancel -> deliveries--; now++; call_time = now; call_state = QUEUED
        :: call_cancel -> call_result = OTHER; call_state = DONE
        :: deliveries == 0 && !call_cancel ->
            w_late[0] = (w_at[0] != IDLE);
            w_late[1] = (w_at[1] != IDLE);
            call_result = OTHER;
            call_state = DONE
        fi }
    od
}

/* ==== activities/reconcile.py ====================================================================================== */

inline reconciled(what) {
    if
    :: r_for != NOBODY -> r_answer = what
    :: else -> r_answer = NOTHING
    fi;
    r_at = IDLE; r_epoch = 0; r_over = false; r_logical = 0
}

active proctype Reconcile() {
end:
    do
    /* ReconcileOperation.reconcile: what the ledger knows */
    :: d_step { r_at == VIEWING ->
        side_effect(found);
        if
        :: n_ended == SUCCEEDED -> reconciled(COMMITTED)
        :: n_ended != SUCCEEDED && (n_logical != r_logical || !found) -> reconciled(ABSENT)
        :: else ->
            r_epoch = o_epoch[r_logical];
            r_over = HORIZON_OVER(r_logical);
            r_at = GETTING
        fi;
        found = false }
    /* ReconcileOperation._ask */
    :: d_step { r_at == GETTING ->
        if
        :: effects[r_logical] > 0 -> r_at = COMMITTED
        :: effects[r_logical] == 0 && r_over -> r_at = ABSENT
        :: effects[r_logical] == 0 && !r_over && r_for == FOR_NODE -> r_at = VIEWING; r_epoch = 0
        :: effects[r_logical] == 0 && !r_over && r_for != FOR_NODE -> reconciled(NO_ANSWER)
        fi }
    :: d_step { r_at == ABSENT -> settle_absent(r_logical, r_epoch); reconciled(ABSENT) }
    /* ReconcileOperation._committed */
    :: d_step { r_at == COMMITTED ->
        if
        :: r_for == FOR_ENTRY -> reconciled(COMMITTED)
        :: else ->
            settle_committed(r_logical, r_epoch, found);
            reconciled((found || !ASKS_THE_LEDGER -> COMMITTED : NO_ANSWER));
            found = false
        fi }
    /* nobody waits any longer; it may go on all the same, or be lost */
    :: d_step { r_at != IDLE && r_for != NOBODY && r_answer == NOTHING -> r_answer = NO_ANSWER }
    :: d_step { r_at != IDLE && (r_for == NOBODY || r_answer == NO_ANSWER) ->
        r_at = IDLE; r_epoch = 0; r_over = false; r_logical = 0 }
    od
}

/* ==== workflows/node.py ============================================================================================ */

#define R_FREE (!ASKABLE || r_at == IDLE && r_for == NOBODY)

inline ask_tool(whom, op) { r_at = VIEWING; r_for = whom; r_logical = op; r_answer = NOTHING }

inline end_workflow(how) {
    d_at = ENDED; d_end = how; d_unknown = false; d_evidence = false;
    promises()
}

/* DeadLetter._check: what the entry shows. */
inline _check_entry() {
    l_side = false;
    side_effect(l_side);
    l_seen = a_count;
}

/* Node._open_dead_letter, or _attach to the one that is open. */
inline _decision(parked) {
    if
    :: !l_open ->
        l_open = true;
        l_redrives = n_redrives;
        _check_entry();
        REACHED(DEAD_LETTER)
    :: else
    fi;
    d_evidence = false; d_unknown = false;
    d_settled = NO_END;
    d_at = parked
}

#define WAS_REDRIVEN 5

inline _hand_over(parked) {
    if
    :: d_settled == WAS_REDRIVEN ->
        d_settled = NO_END;
        d_logical = n_logical;
        d_redrives = n_redrives;
        if
        :: parked == PARKED -> d_at = START
        :: else -> end_workflow(CANCELLED)
        fi
    :: d_settled == SUCCEEDED || d_settled == RESOLVED -> d_settled = NO_END; end_workflow(SUCCEEDED)
    :: d_settled == DISCARDED -> d_settled = NO_END; end_workflow(DISCARDED)
    fi
}

active proctype Node() {
end:
    do
    /* Node._work, Node._perform */
    :: d_step { d_at == START && d_cancelling -> d_at = SETTLING }
    :: d_step { d_at == START && !d_cancelling ->
        if
        :: deliveries > 0 ->
            deliveries--; now++;
            call_state = QUEUED; call_time = now; call_result = NOTHING; call_cancel = false;
            d_at = CALLING
        :: else -> d_unknown = false; d_at = FAILED
        fi }
    /* Node._answered */
    :: d_step { d_at == CALLING && call_state == DONE ->
        if
        :: call_result == OK -> REACHED(SUCCESS); end_workflow(SUCCEEDED)
        :: call_result == WAS_DISCARDED -> end_workflow(DISCARDED)
        :: call_result == WAS_CANCELLED -> d_cancelling = true; d_at = SETTLING
        :: call_result == MOVED -> d_logical = call_logical; d_redrives = call_redrives; d_at = START
        :: call_result == UNKNOWN -> d_unknown = true; d_at = FAILED
        :: call_result == OTHER -> d_unknown = false; d_at = FAILED
        fi;
        call_state = NO_CALL; call_result = NOTHING; call_logical = 0; call_redrives = 0; call_cancel = false; call_time = 0 }
    /* Node._failed: gather, reconcile, gather, hand over */
    :: d_step { d_at == FAILED && R_FREE ->
        d_evidence = false;
        side_effect(d_evidence);
        if
        :: d_evidence && ASKABLE -> d_evidence = false; ask_tool(FOR_NODE, d_logical); d_at = ASKING
        :: else -> d_at = HANDING
        fi }
    :: d_step { d_at == ASKING && r_answer != NOTHING ->
        if
        :: r_answer == COMMITTED -> end_workflow(SUCCEEDED)
        :: r_answer == ABSENT && d_unknown && !d_cancelling && !n_cancelled -> d_evidence = false; d_at = START
        :: else -> d_at = GATHERING
        fi;
        r_for = NOBODY; r_answer = NOTHING }
    :: d_step { d_at == GATHERING -> d_evidence = false; side_effect(d_evidence); d_at = HANDING }
    :: d_step { d_at == HANDING ->
        if
        :: d_cancelling && !d_evidence && CANCEL_FIRST -> d_at = SETTLING
        :: d_cancelling && !d_evidence && !CANCEL_FIRST -> end_workflow(CANCELLED)
        :: else -> _decision(PARKED)
        fi }
    :: d_step { (d_at == PARKED || d_at == PARKED_C) && d_settled != NO_END -> _hand_over(d_at) }
    /* Node._leave: the dead letter outlives it */
    :: d_step { (d_at == PARKED || d_at == PARKED_C) && d_settled == NO_END && d_cancelling ->
        _check_entry(); REACHED(OUTLIVED); end_workflow(CANCELLED) }
    /* Node._settle_cancelled */
    :: d_step { d_at == SETTLING && R_FREE ->
        d_evidence = false;
        side_effect(d_evidence);
        if
        :: !d_evidence -> REACHED(CANCELLED_END); end_workflow(CANCELLED)
        :: d_evidence && ASKABLE -> d_evidence = false; ask_tool(FOR_NODE, d_logical); d_at = ASKING_C
        :: else -> d_evidence = false; d_at = HANDING_C
        fi }
    :: d_step { d_at == ASKING_C && r_answer != NOTHING ->
        if
        :: r_answer == COMMITTED -> end_workflow(SUCCEEDED)
        :: r_answer == ABSENT -> end_workflow(CANCELLED)
        :: else -> d_at = HANDING_C
        fi;
        r_for = NOBODY; r_answer = NOTHING }
    :: d_step { d_at == HANDING_C -> _decision(PARKED_C) }
    od
}

/* ==== workflows/dead_letter.py, activities/preflight.py: a person ================================================== */

#define SAME     1
#define ANEW     2
#define RESOLVE  3
#define DISCARD  4

inline closes(how) {
    l_open = false; l_side = false; l_redrives = 0; l_seen = 0;
    if
    :: d_at == PARKED || d_at == PARKED_C -> d_settled = how
    :: else
    fi
}

/* DeadLetter._note: what the check found may leave nothing to decide. */
inline _note() {
    _check_entry();
    if
    :: n_ended != NO_END -> closes(n_ended)
    :: n_ended == NO_END && n_redrives > l_redrives -> closes(WAS_REDRIVEN)
    :: else
    fi
}

/* Store.decide. */
inline decide(change, overridden) {
    if
    :: n_ended != NO_END || n_redrives > l_redrives -> _note()                       /* _too_late */
    :: n_ended == NO_END && n_redrives <= l_redrives && n_cancelled && (change == SAME || change == ANEW) -> skip
    :: n_ended == NO_END && n_redrives <= l_redrives && !(n_cancelled && (change == SAME || change == ANEW)) && OUTDATED ->
        REACHED(EVIDENCE)                                                            /* EVIDENCE_CHANGED */
    :: else ->
        fence_operation(n_logical);
        if
        :: change == RESOLVE || change == DISCARD ->
            known = known || l_side;
            if
            :: change == RESOLVE -> settle_attempts(n_logical, 255); n_ended = RESOLVED; REACHED(RESOLVED_END)
            :: else -> n_ended = DISCARDED; REACHED(DISCARDED_END)
            fi
        :: else ->
            if
            :: overridden -> risks++; known = true; REACHED(RISK_TAKEN)
            :: else
            fi;
            for (i : 0 .. ATTEMPTS - 1) {                                            /* accept_risk */
                if
                :: i < a_count && a_op[i] == n_logical && !a_settled[i] && ACCEPTED(overridden) -> a_accepted[i] = true
                :: else
                fi
            }
            i = 0;
            n_redrives++;                                                            /* redrive_node */
            n_budget_from = a_count;
            deliveries++;
            REACHED(REDRIVEN);
            if
            :: change == ANEW -> n_logical++; REACHED(NEW_OPERATION)
            :: else
            fi
        fi;
        n_fence = now + 1;
        closes((change == RESOLVE -> RESOLVED : (change == DISCARD -> DISCARDED : WAS_REDRIVEN)));
        promises()
    fi
}

/* preflight._effect_refusal: nothing it knows of stands in the way. */
#define HARMLESS(change) (!l_side || KIND == READ || DEDUPES && change == SAME)

#define LOOKING     (change == NOTHING && !asked)
#define CAN_REDRIVE (d_at != ENDED && !run_cancelling && n_redrives < REDRIVES)

/* preflight, with an override where it would be refused otherwise */
inline chooses(what) {
    if
    :: l_open -> change = what; overridden = (what == SAME || what == ANEW) && !HARMLESS(what)
    :: else
    fi
}

active proctype Person() {
    byte change;
    bool overridden;
    bool asked;
end:
    do
    /* every decision begins with a look at the present */
    :: d_step { l_open && LOOKING && CAN_REDRIVE -> _note(); chooses(SAME) }
    :: d_step { l_open && LOOKING && CAN_REDRIVE -> _note(); chooses(ANEW) }
    :: d_step { l_open && LOOKING -> _note(); chooses(RESOLVE) }
    :: d_step { l_open && LOOKING -> _note(); chooses(DISCARD) }
    :: d_step { l_open && LOOKING && ASKABLE && R_FREE -> _note();
        if
        :: l_open -> ask_tool(FOR_ENTRY, n_logical); asked = true
        :: else
        fi }
    /* it is left as it is, for months if need be */
    :: l_open && LOOKING -> break
    :: d_step { change != NOTHING ->
        if
        :: l_open -> decide(change, overridden)
        :: else
        fi;
        change = NOTHING; overridden = false }
    /* DeadLetter._reconcile, _reconciled */
    :: d_step { asked && r_answer != NOTHING ->
        if
        :: r_answer == COMMITTED && l_open && n_ended == NO_END && n_redrives <= l_redrives ->
            REACHED(RECONCILED);
            fence_operation(n_logical);
            settle_attempts(n_logical, 255);
            known = true;
            _end_node(RESOLVED);
            n_fence = now + 1;
            closes(RESOLVED)
        :: else
        fi;
        r_for = NOBODY; r_answer = NOTHING; asked = false }
    od
}

/* ==== a cancel, by the run or of the node itself; a reset ========================================================== */

#if CANCELS
active proctype Cancel() {
    if
    :: goto end                                         /* never */
    :: d_step { run_cancelling = true; ledger_cancel() }      /* Run._cancel: the ledger first */
    :: run_cancelling = true
    fi;
    /* Node._cancel */
    if
    :: d_at == ENDED -> goto end
    :: d_step { d_at != ENDED -> d_cancelling = !CANCEL_FIRST };
    fi;
    d_step { ledger_cancel() };
    d_step {
        if
        :: d_at != ENDED -> d_cancelling = true
        :: else
        fi;
        if
        :: call_state == QUEUED -> call_result = OTHER; call_state = DONE
        :: call_state == STARTED -> call_cancel = true
        :: else
        fi };
end:
    skip
}
#endif

#if RESETS
active proctype Reset() {
    if
    :: skip                                             /* never */
    :: d_step {
        d_at = START; d_logical = 0; d_redrives = 0; d_end = NO_END; d_settled = NO_END; d_cancelling = false;
        d_unknown = false; d_evidence = false;
        call_state = NO_CALL; call_result = NOTHING; call_logical = 0; call_redrives = 0; call_cancel = false; call_time = 0;
        deliveries++;
        if
        :: r_for == FOR_NODE -> r_for = NOBODY; r_answer = NOTHING
        :: else
        fi }
    fi
}
#endif

/* ==== what must hold when nothing can happen any more ============================================================== */

active proctype Checker() {
    bool side;
    atomic { timeout ->
        promises();
        /* never stuck: the node has ended, or waits for a person who can be asked */
        assert(d_at == ENDED || (d_at == PARKED || d_at == PARKED_C) && l_open);
        /* 2. no uncertain effect is forgotten */
        side_effect(side);
        assert(EFFECTS == 0 || n_ended != NO_END || known || l_open && side) }
}
