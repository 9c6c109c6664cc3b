-- book, version 7: code that all scripts of the lease store share, put before each of them.
--
-- A transcription of gateway/admission/token_pool.py and admission.py, including
-- names and the order of floating-point operations, so that both give the same decisions.
--
-- KEYS     all of one model and one hash tag, `sluice:7:{MODEL}:NAME`, the same for every script:
--   1 state         hash: "terms", "book" -> records; "clock" -> two times, see book_time
--   2 defs          hash: entitlement -> record of its terms
--   3 accounts      hash: entitlement -> record of its counters; absent: all are zero
--   4 leases        hash: lease id -> record
--   5 expiry        sorted set: serial .. lease id, by expiry
--   6 graves        hash: expired lease id -> msgpack {entitlement, tokens charged, funded, held};
--                   {false} for an adopted lease that was settled
--   7 graves_order  sorted set: their ids, by serial
--   8 active        set: entitlements that the next tick must update
--   9 ticking       set: entitlements that a tick in progress has yet to update
--  10 evictions     sorted set, all scores 0: owner NUL lease id
--  11 leader        string: the replica that ticks
--  12 replicas      sorted set: replicas by the time of their last tick
--  13 dedicated     sorted set: dedicated entitlements by order of creation
--  14 + 4p ..       of pool p, from 0: weights (sorted set of lease ids by weight), evictable
--                   (sorted set likewise), denials and denials_last (sorted sets of tenants by
--                   weight: those refused by the pool in this tick, and in the last but not this)
-- ARGV     see each script; tests append the time
--
-- Counters of limits that span models are in a hash of their own, which calls name (limits.lua).
--
-- A record holds its fields in msgpack, one after another and without their names, which would
-- cost more to read and write than all values. scripts.py has the names (RECORDS) and expands
-- READ_ and PACKED_ in place, because every run would have to make a further function anew.
-- Lua finds a function's upvalue by searching all variables declared after it. So each LAYER mark
-- starts a separate function, which gets the earlier variables at once.
--
-- Times are Unix seconds by the server's clock without its jumps (see book_time); tokens and bytes
-- are whole numbers. Callers count pools from 0, so pool p is `book.pools[p + 1]`.
-- Errors: NOSTATE (the model is not known here: define it), POOLS n (it has n pools).

local STATE, DEFS, ACCOUNTS, LEASES, EXPIRY, GRAVES, GRAVES_ORDER, ACTIVE, TICKING, EVICTIONS,
  LEADER, REPLICAS, DEDICATED = unpack(KEYS, 1, 13)

local LEASE_TTL_S, REAPED_AT_ONCE, TOMBSTONES, DENIALS_KEPT = 30, 64, 10000, 2000
local FIRST_SERVICE_S, BUCKET_S, MEAN_GAIN = 5, 10, 0.1
local SPILLED_WEIGHT, LEAST_DEBT_FACTOR, MOST_S = 1, 0.05, 60
local UNLIMITED, SAVED_AT_ONCE = 2 ^ 53, 1000

local CLASS_WEIGHT =
  {dedicated = 1000, guaranteed = 1000, elastic = 100, spot = 1, preemptible = 0.1}
local BAND_LOW =
  {dedicated = 501, guaranteed = 501, elastic = 1.01, spot = 0.101, preemptible = 1e-6}
local BAND_HIGH =
  {dedicated = 1000, guaranteed = 1000, elastic = 500, spot = 1, preemptible = 0.1}
local RESERVING = {dedicated = true, guaranteed = true}
local BURST_WEIGHT = BAND_LOW.elastic
local BORROWING = {dedicated = true, elastic = true, spot = true}
local BACKFILL = {spot = true, preemptible = true}

local call, pack, unpacked, max, min = redis.call, cmsgpack.pack, cmsgpack.unpack, math.max, math.min

local function server_time()
  local t = call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1e6
end

-- The server's clock may be set, or be another server's after a failover. So time continues from
-- the last tick (`clock` in the state: the server's reading and this time), by LEAP_S at most:
-- replicas tick four times a second. Each tick reports the time passed by the replica's clock.
-- Limits, which span models, have one time for all of them (`clock` in their hash).
local LEAP_S = 2
local state = call('HMGET', STATE, 'terms', 'book', 'clock')
local function steady(kept, read_s)
  local then_s, was_s = string.match(kept, '^(%S+) (%S+)$')
  return was_s + min(max(read_s - then_s, 0), LEAP_S), tonumber(then_s)
end
local function book_time()
  local read_s, kept = server_time(), state[3]
  if not kept then return read_s, read_s end
  local time_s, then_s = steady(kept, read_s)
  return time_s, read_s, then_s
end
local now_s, read_s, ticked_by_s = book_time()

-- -- state

local terms, book
local accounts = {}

-- LIMITS
-- LAYER

local function weights_of(p) return KEYS[14 + 4 * p] end
local function evictable_of(p) return KEYS[15 + 4 * p] end

-- Loads the model. Returns nil, or the error reply.
local function load_book()
  if not (state[1] and state[2]) then return redis.error_reply('NOSTATE the model is unknown') end
  terms = READ_terms(state[1])
  book = READ_book(state[2])
  terms.profile = READ_profile(terms.profile)
  for i, kept in ipairs(book.pools) do
    book.pools[i] = READ_pool(kept)
    local pool = book.pools[i] -- one of a version before this has no such fields
    pool.refused_tokens, pool.served_tokens = pool.refused_tokens or 0, pool.served_tokens or 0
  end
  if #KEYS < 13 + 4 * #book.pools then
    return redis.error_reply('POOLS ' .. #book.pools)
  end
  return nil
end

-- An entitlement's account, with its terms as `terms`; nil if it is not defined.
local function account_of(name)
  local account = accounts[name]
  if account then return account end
  local def = call('HGET', DEFS, name)
  if not def then return nil end
  local kept = call('HGET', ACCOUNTS, name)
  if kept then
    account = READ_account(kept)
  else
    account = {
      inflight = {}, spilled = {}, total = 0, kv_bytes = 0, level = 0, level_s = 0, borrowed = 0,
      borrowed_s = 0, debt = 0, burst = 0, served = 0, denied = 0, denied_seconds = 0,
      denied_kv_seconds = 0, promised = 0, promised_s = 0, waiters = 0, waiters_s = 0,
      mean_cost = 0, inflight_seconds = 0, kv_seconds = 0, since_s = 0, debited = 0, refunded = 0,
      used = 0,
    }
  end
  for p = #account.inflight + 1, #book.pools do
    account.inflight[p], account.spilled[p] = 0, 0
  end
  account.terms = READ_entitlement(def)
  account.name = name
  accounts[name] = account
  return account
end

-- Writes the book and every account that was loaded.
local function save()
  local written = {}
  for name, account in pairs(accounts) do
    written[#written + 1] = name
    written[#written + 1] = PACKED_account(account)
  end
  for i = 1, #written, SAVED_AT_ONCE do
    call('HSET', ACCOUNTS, unpack(written, i, min(i + SAVED_AT_ONCE - 1, #written)))
  end
  local pools = book.pools
  book.pools = {}
  for i, pool in ipairs(pools) do book.pools[i] = PACKED_pool(pool) end
  call('HSET', STATE, 'book', PACKED_book(book))
  book.pools = pools
end

local function next_serial()
  book.serial = book.serial + 1
  return string.format('%016.0f', book.serial)
end

local function lease_of(id)
  local kept = call('HGET', LEASES, id)
  if not kept then return nil end
  local lease
  lease = READ_lease(kept)
  return lease
end

local made_limits
local function limits()
  made_limits = made_limits or make_limits()
  return made_limits
end

-- -- ledger

-- LAYER

local function baseline_of(entitlement, p) return entitlement.baseline[p + 1] or 0 end
local function slots_of(p) return terms.slots[p + 1] or 0 end
local function kv_of(p) return terms.kv_bytes[p + 1] or 0 end

local function all_slots()
  local sum = 0
  for _, slots in ipairs(terms.slots) do sum = sum + slots end
  return sum
end

local function bound_in(p) return terms.bound_until[p + 1] or UNLIMITED end

local function bound(entitlement, p)
  return not RESERVING[entitlement.service_class] or entitlement.created <= bound_in(p)
end

-- Sequences in flight in a pool that did not spill over from another; they use its baseline.
local function own(account, p) return account.inflight[p + 1] - account.spilled[p + 1] end

-- Idle slots that a pool keeps for a dedicated entitlement bound there.
local function idle_of(account, p)
  if account.terms.suspended then return 0 end
  return max(0, baseline_of(account.terms, p) - account.inflight[p + 1])
end

local function reserve(account, sign)
  if account.terms.service_class ~= 'dedicated' then return end
  for i, pool in ipairs(book.pools) do
    if bound(account.terms, i - 1) then
      pool.idle_dedicated = pool.idle_dedicated + sign * idle_of(account, i - 1)
    end
  end
end

-- Counts sequences and KV in (positive) or out (negative) of a pool.
local function move(account, p, sequences, kv_bytes)
  local pool = book.pools[p + 1]
  local dedicated = account.terms.service_class == 'dedicated'
  if dedicated then reserve(account, -1) end
  account.inflight[p + 1] = account.inflight[p + 1] + sequences
  if dedicated then reserve(account, 1) end
  account.total = account.total + sequences
  account.kv_bytes = account.kv_bytes + kv_bytes
  pool.inflight = pool.inflight + sequences
  pool.kv_bytes = pool.kv_bytes + kv_bytes
  if not RESERVING[account.terms.service_class] then pool.unreserved = pool.unreserved + sequences end
end

local function gives_way(account, lease)
  local class = account.terms.service_class
  local backfill = lease.spilled or class == 'spot'
  return class == 'preemptible' or (backfill and terms.reclaim_spot)
end

local function file(account, lease, id)
  call('ZADD', weights_of(lease.pool), lease.weight, id)
  if lease.spilled then
    account.spilled[lease.pool + 1] = account.spilled[lease.pool + 1] + lease.sequences
  end
  lease.evictable = gives_way(account, lease)
  if lease.evictable then call('ZADD', evictable_of(lease.pool), lease.weight, id) end
end

local function keep(lease, id) call('HSET', LEASES, id, PACKED_lease(lease)) end

-- Starts a lease's time to live anew.
local function put_off(lease, id)
  local expires_s = now_s + LEASE_TTL_S
  lease.serial = next_serial()
  call('ZADD', EXPIRY, expires_s, lease.serial .. id)
  book.reap_at_s = min(book.reap_at_s, expires_s)
end

-- Adds a lease to all indexes.
local function hold(account, lease, id)
  put_off(lease, id)
  call('SADD', ACTIVE, lease.entitlement)
  file(account, lease, id)
  keep(lease, id)
end

-- Takes a lease out of its pool's indexes and counters; it may be filed in another pool.
local function release(account, lease, id)
  call('ZREM', weights_of(lease.pool), id)
  if lease.evictable then call('ZREM', evictable_of(lease.pool), id) end
  if lease.spilled then
    account.spilled[lease.pool + 1] = account.spilled[lease.pool + 1] - lease.sequences
  end
  move(account, lease.pool, -lease.sequences, -lease.kv_bytes)
end

-- -- weights and buckets

local function weight_now(account)
  local entitlement, profile = account.terms, terms.profile
  local urgency = 1
  if entitlement.slo_ms > 0 and terms.mean_slo_ms > 0 then
    urgency = entitlement.slo_ms / terms.mean_slo_ms
  end
  local class = entitlement.service_class
  local w = CLASS_WEIGHT[class] / (1 + profile.slo_share * urgency)
  w = w / (1 + profile.burst_share * account.burst)
  w = w * max(LEAST_DEBT_FACTOR, 1 + profile.debt_share * account.debt)
  if account.debt > profile.overdue_debt and class == 'elastic' and account.total == 0 then
    local baseline = 0
    for _, n in ipairs(entitlement.baseline) do baseline = baseline + n end
    if baseline > 0 then return BAND_HIGH[class] end
  end
  return min(max(w, BAND_LOW[class]), BAND_HIGH[class])
end

-- r_e over all pools: the baseline of a guaranteed entitlement, else its limit or C.
local function most_sequences(account)
  local entitlement = account.terms
  if entitlement.service_class == 'guaranteed' then
    local sum = 0
    for _, n in ipairs(entitlement.baseline) do sum = sum + n end
    return sum
  end
  return entitlement.limit > 0 and entitlement.limit or all_slots()
end

local function depth_tokens(account)
  local floor_tokens = max(BUCKET_S * account.terms.tokens_per_s, terms.largest_tokens)
  return max(floor_tokens, most_sequences(account) * account.mean_cost)
end

-- Level of an entitlement's own bucket, filled up to now.
local function own_level(account, depth)
  local passed_s = now_s - account.level_s
  if passed_s > 0 then
    account.level = account.level + account.terms.tokens_per_s * passed_s
    account.level_s = now_s
  end
  account.level = min(account.level, depth)
  return account.level
end

local function surplus_depth()
  local rate = terms.tokens_per_s
  return rate > 0 and max(BUCKET_S * rate, terms.largest_tokens) or 0
end

-- Level of the surplus bucket, filled up to now.
local function surplus_level()
  local gained = book.surplus_per_s * max(0, now_s - book.surplus_s)
  book.surplus = min(surplus_depth(), book.surplus + gained)
  book.surplus_s = max(now_s, book.surplus_s)
  return book.surplus
end

-- Tokens borrowed and not yet drained at the limit's part above lambda_e.
local function recently_borrowed(account)
  local rate = max(0, account.terms.tokens_per_s_limit - account.terms.tokens_per_s)
  return max(0, account.borrowed - rate * max(0, now_s - account.borrowed_s))
end

-- chi_e at most; 0 for the capacity.
local function kv_limit(entitlement)
  local limit = entitlement.kv_bytes_limit
  if limit == 0 and entitlement.service_class == 'guaranteed' then return entitlement.kv_bytes end
  return limit
end

-- Takes tokens from the bucket that funds a lease (negative: gives back, up to its depth).
local function pay(account, funded, tokens)
  if funded == 'own' then
    local depth = depth_tokens(account)
    local level = own_level(account, depth) - tokens
    account.level = min(level, depth)
  elseif funded == 'surplus' then
    if terms.tokens_per_s > 0 then
      local level = surplus_level() - tokens
      book.surplus = min(level, surplus_depth())
    end
    if account.terms.tokens_per_s_limit > 0 then
      account.borrowed = max(0, recently_borrowed(account) + tokens)
      account.borrowed_s = now_s
    end
  end
end

-- Replaces a reserved estimate by the usage, in bucket and ledger.
local function correct(account, funded, estimate, used)
  if used ~= estimate then pay(account, funded, used - estimate) end
  if used <= estimate then
    account.refunded = account.refunded + (estimate - used)
  else
    account.debited = account.debited + (used - estimate)
  end
  account.used = account.used + used
end

local function serve(account, p, funded, tokens)
  account.served = account.served + tokens
  book.pools[p + 1].served_tokens = book.pools[p + 1].served_tokens + tokens
  if funded ~= 'surplus' then book.own_served = book.own_served + tokens end
  call('SADD', ACTIVE, account.name)
end

-- Extends the tick's integrals of sequences and KV up to now.
local function average(account)
  local passed_s = now_s - account.since_s
  if passed_s <= 0 then return end
  if account.total > 0 then
    account.inflight_seconds = account.inflight_seconds + account.total * passed_s
    account.kv_seconds = account.kv_seconds + account.kv_bytes * passed_s
  end
  account.since_s = now_s
end

-- Removes a lease from all keys and counters.
local function finish(account, lease, id)
  call('HDEL', LEASES, id)
  call('ZREM', EXPIRY, lease.serial .. id)
  if lease.evicted then call('ZREM', EVICTIONS, lease.owner .. '\0' .. id) end
  release(account, lease, id)
end

local function bury(id, grave)
  call('HSET', GRAVES, id, pack(grave))
  call('ZADD', GRAVES_ORDER, next_serial(), id)
  if call('HLEN', GRAVES) > TOMBSTONES then
    local oldest = call('ZRANGE', GRAVES_ORDER, 0, 0)[1]
    call('ZREM', GRAVES_ORDER, oldest)
    call('HDEL', GRAVES, oldest)
  end
end

-- Ends expired leases, charging their estimate; returns how many. None expires before reap_at_s.
local function reap(most)
  if now_s < book.reap_at_s then return 0 end
  local due = call('ZRANGEBYSCORE', EXPIRY, '-inf', now_s, 'LIMIT', 0, most)
  for _, member in ipairs(due) do
    local id = string.sub(member, 17)
    local lease = lease_of(id)
    local account = account_of(lease.entitlement)
    average(account)
    finish(account, lease, id)
    account.used = account.used + lease.estimate_tokens
    serve(account, lease.pool, lease.funded, lease.estimate_tokens)
    if lease.held then limits().more().lapse(lease.held) end
    bury(id, {lease.entitlement, lease.estimate_tokens, lease.funded, lease.held})
  end
  local first = call('ZRANGE', EXPIRY, 0, 0, 'WITHSCORES')
  book.reap_at_s = first[2] and tonumber(first[2]) or now_s + LEASE_TTL_S
  return #due
end
