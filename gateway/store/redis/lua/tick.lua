-- tick, version 7: notes that a replica lives; if it leads and a tick is due, applies one slice.
--
-- A transcription of gateway/admission/debt.py. A tick is applied in slices of `most`
-- entitlements, all with the elapsed time and contention of its start. A new leader continues an
-- unfinished tick. A model's keys expire KEPT_S after its last tick.
--
-- KEYS     see book.lua
-- ARGV[1]  {owner, leader_ms, silent_s, most, least_s, limits, limits_least_s}: a leader that does
--          not call for leader_ms is replaced; a replica that does not call for silent_s is not
--          counted; least_s: a lower bound on the time (0: the replica knows none yet); limits: the
--          hash of limits' counters, and a lower bound on their time
--
-- Returns {1 if this replica leads, entitlements left in the tick (-1: no tick was due), replicas,
-- epoch, microseconds that this call took (0 where time stands still in a script), time, time of
-- limits}. The epoch changes when the server lost its state.

local function denials_of(p) return KEYS[16 + 4 * p] end
local function denials_last_of(p) return KEYS[17 + 4 * p] end

local began_s = server_time()

local SETTLED = 1e-3
local KEPT_S = 7 * 86400

local function is_contended()
  for i, pool in ipairs(book.pools) do
    if terms.slots[i] and pool.inflight >= terms.slots[i] then return true end
  end
  return book.priority_denials > 0
end

local function over(used, baseline)
  if baseline <= 0 then return 0 end
  return max(0, used / baseline - 1)
end

-- Share of what was promised that is missing, in the entitlement's unit; below 0: overuse.
local function gap_of(account, rate, sequences, kv, baseline, elapsed_s)
  local entitlement = account.terms
  if entitlement.tokens_per_s > 0 then
    return (entitlement.tokens_per_s - rate) / entitlement.tokens_per_s
  elseif baseline > 0 then
    return min(baseline - sequences, account.denied_seconds / elapsed_s) / baseline
  elseif entitlement.kv_bytes > 0 then
    local owed = min(entitlement.kv_bytes - kv, account.denied_kv_seconds / elapsed_s)
    return owed / entitlement.kv_bytes
  end
  return 0
end

local function update(account, elapsed_s, contended)
  local entitlement, profile = account.terms, terms.profile
  elapsed_s = max(1e-3, elapsed_s)
  local missed = max(1, math.floor(elapsed_s / profile.tick_s + 0.5))
  local dt = max(0, now_s - account.since_s)
  local sequences = (account.inflight_seconds + account.total * dt) / elapsed_s
  local kv = (account.kv_seconds + account.kv_bytes * dt) / elapsed_s
  local rate = account.served / elapsed_s
  local debt_kept = profile.debt_keep ^ missed
  local burst_kept = profile.burst_keep ^ missed
  local baseline = 0
  for _, n in ipairs(entitlement.baseline) do baseline = baseline + n end
  if entitlement.service_class == 'elastic' then
    local gap = gap_of(account, rate, sequences, kv, baseline, elapsed_s)
    if gap > 0 and not (contended and account.denied > 0) then gap = 0 end
    local debt = debt_kept * account.debt + (1 - debt_kept) * gap
    account.debt = min(max(debt, profile.least_debt), 1)
  else
    account.debt = 0
  end
  local beyond = over(rate, entitlement.tokens_per_s)
  beyond = beyond + over(kv, entitlement.kv_bytes)
  beyond = beyond + over(sequences, baseline)
  account.burst = burst_kept * account.burst + (1 - burst_kept) * beyond
  account.served = 0
  account.denied = 0
  account.denied_seconds = 0
  account.denied_kv_seconds = 0
  account.inflight_seconds = 0
  account.kv_seconds = 0
  account.since_s = now_s
end

-- Ends the tick for the pool as a whole.
local function close(elapsed_s)
  surplus_level()
  book.surplus_per_s = max(0, terms.tokens_per_s - book.own_served / max(1e-3, elapsed_s))
  book.own_served = 0
  book.priority_denials = 0
  for p = 0, #book.pools - 1 do
    if call('EXISTS', denials_of(p)) == 1 then
      call('RENAME', denials_of(p), denials_last_of(p))
    else
      call('DEL', denials_last_of(p))
    end
  end
  book.ticked_s = now_s
end

local function slice(most)
  if not book.tick then
    if now_s - book.ticked_s < terms.profile.tick_s then return -1 end
    book.tick = {elapsed_s = now_s - book.ticked_s, contended = is_contended()}
    if call('EXISTS', ACTIVE) == 1 then call('RENAME', ACTIVE, TICKING) end
  end
  for _, name in ipairs(call('SPOP', TICKING, most)) do
    local account = account_of(name)
    if account then
      update(account, book.tick.elapsed_s, book.tick.contended)
      local idle = account.total == 0 and math.abs(account.debt) <= SETTLED
        and account.burst <= SETTLED
      if not idle then call('SADD', ACTIVE, name) end
    end
  end
  local left = call('SCARD', TICKING)
  if left == 0 then
    close(book.tick.elapsed_s)
    book.tick = nil
    for _, key in ipairs(KEYS) do
      if key ~= LEADER then call('EXPIRE', key, KEPT_S) end
    end
  end
  return left
end

-- Advances a stored time, which was last stored when the server's clock showed then_s.
local function keep_time(key, time_s, then_s, least_s)
  time_s = max(time_s, least_s)
  -- If all replicas were away, none knows the time passed, so the server's clock is trusted.
  if least_s == 0 and then_s and read_s - then_s > arg.silent_s then time_s = max(time_s, read_s) end
  call('HSET', key, 'clock', string.format('%.6f %.6f', read_s, time_s))
  return time_s
end

-- Whether the server's clock has been that far from the limits' time for ASTRAY_FOR_S: it was
-- wrong at first, and has been set right. `astray` has since when, and how far.
local ASTRAY_S, ASTRAY_FOR_S, TOLD_S = 1, 60, 5
local function astray(kept, off_s)
  if math.abs(off_s) < ASTRAY_S then
    if kept then call('HDEL', arg.limits, 'astray') end
    return false
  end
  local since_s, before_s = string.match(kept or '', '^(%S+) (%S+)$')
  if not since_s or math.abs(off_s - before_s) > ASTRAY_S then
    call('HSET', arg.limits, 'astray', string.format('%.6f %.6f', read_s, off_s))
    return false
  end
  return read_s - since_s >= ASTRAY_FOR_S
end

-- `set` has when the limits' time was set: until all replicas were told they know another one.
local function keep_limits_time()
  local kept = call('HMGET', arg.limits, 'clock', 'astray', 'set')
  local time_s, then_s, least_s = now_s, nil, arg.limits_least_s
  if kept[1] then time_s, then_s = steady(kept[1], read_s) end
  if kept[3] and math.abs(read_s - kept[3]) < TOLD_S then
    least_s = time_s
  elseif astray(kept[2], read_s - max(time_s, least_s)) then
    time_s, least_s = read_s, read_s
    call('HSET', arg.limits, 'set', string.format('%.6f', read_s))
  end
  return keep_time(arg.limits, time_s, then_s, least_s)
end

local failed = load_book()
if failed then return failed end
local limits_s = now_s
if read_s then
  now_s = keep_time(STATE, now_s, ticked_by_s, arg.least_s)
  limits_s = keep_limits_time()
end
if arg.limits then limits().more().tick(arg.limits, limits_s, 2 * LEASE_TTL_S) end
call('ZADD', REPLICAS, now_s, arg.owner)
call('ZREMRANGEBYSCORE', REPLICAS, '-inf', now_s - arg.silent_s)
local leads = call('GET', LEADER) == arg.owner
if leads then
  call('PEXPIRE', LEADER, arg.leader_ms)
else
  leads = call('SET', LEADER, arg.owner, 'NX', 'PX', arg.leader_ms) and true
end
local left = -1
if leads then
  left = slice(arg.most)
  if left >= 0 then save() end
end
local took_us = math.floor((server_time() - began_s) * 1e6)
local time, limits_time = string.format('%.6f', now_s), string.format('%.6f', limits_s)
return {leads and 1 or 0, left, call('ZCARD', REPLICAS), book.epoch, took_us, time, limits_time}
