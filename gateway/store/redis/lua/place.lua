-- place, version 7: finds a pool for a request, or the denial and its wait. Shared by the scripts
-- that admit and transfer. A transcription of gateway/admission/checks.py and of the waits in
-- token_pool.py.
--
-- `request` everywhere: {entitlement, pool, alternates, estimate_tokens, kv_bytes, sequences,
-- demoted}.
-- A place: {pool, spilled, contended, denied}. A denial: {reason, wait_s, limit, used, requested,
-- unit, of the pool}; the last field tells whether the pool, not the entitlement, is the reason.

local function denials_of(p) return KEYS[16 + 4 * p] end
local function denials_last_of(p) return KEYS[17 + 4 * p] end

local function least_weight(p)
  local least = call('ZRANGE', weights_of(p), 0, 0, 'WITHSCORES')
  return least[2] and tonumber(least[2]) or 0
end

local function overshoot(slots) return max(1, math.ceil(slots / 8)) end

-- Slots taken, or kept for dedicated entitlements other than this one.
local function occupied(account, p)
  local pool, entitlement = book.pools[p + 1], account.terms
  local reserved = pool.idle_dedicated
  if reserved == 0 then return pool.inflight end
  local dedicated = entitlement.service_class == 'dedicated' and not entitlement.suspended
  if dedicated and bound(entitlement, p) then
    reserved = reserved - max(0, baseline_of(entitlement, p) - account.inflight[p + 1])
  end
  return pool.inflight + reserved
end

local function kv_over(p, kv_bytes, allowance)
  local capacity = kv_of(p)
  return capacity > 0 and book.pools[p + 1].kv_bytes + kv_bytes > capacity + allowance
end

-- Whether an alternate pool has idle slots and KV.
local function idle_room(account, p, request)
  if occupied(account, p) + request.sequences > slots_of(p) - terms.headroom then return false end
  return not kv_over(p, request.kv_bytes, 0)
end

-- Whether a request is within its entitlement's baseline in the requested pool.
local function within_reserve(account, request)
  if not RESERVING[account.terms.service_class] or request.demoted then return false end
  return own(account, request.pool) + request.sequences <= baseline_of(account.terms, request.pool)
end

-- Whether a request could enter a full pool by its weight.
local function could_outrank(request)
  local kv_bytes = kv_of(request.pool)
  local fits = kv_bytes == 0 or request.kv_bytes <= math.floor(kv_bytes / 8)
  return fits and request.sequences <= overshoot(slots_of(request.pool))
end

-- Whether the pool would hold the request without the classes that reserve nothing.
local function makes_way(account, p, request)
  local lower = book.pools[p + 1].unreserved
  return lower > 0 and occupied(account, p) - lower + request.sequences <= slots_of(p)
end

-- Check 7 for unprotected traffic; preemptible requests never outrank others.
local function outranking(account, request, w, used)
  local p = request.pool
  local slots, least = slots_of(p), least_weight(p)
  local place = {pool = p, spilled = false, contended = true}
  -- A least weight of 0: nothing is in flight, all slots are kept for idle dedicated baselines.
  if account.terms.service_class == 'preemptible' or least == 0 or w <= least then
    place.denied = 'priority'
  elseif used + request.sequences > slots + overshoot(slots) then
    place.denied = 'priority'
  elseif kv_over(p, request.kv_bytes, math.floor(kv_of(p) / 8)) then
    place.denied = 'kv'
  end
  return place
end

-- Checks 7 and 8: the requested pool, an alternate with idle room, or a denial.
local function find_place(account, request, w)
  local entitlement, p, n = account.terms, request.pool, request.sequences
  local slots = slots_of(p)
  local used = occupied(account, p)
  local reserved = within_reserve(account, request)
  local protected = reserved and bound(entitlement, p)
  local kv_full = kv_over(p, request.kv_bytes, 0)
  local contended = kv_full or used + n > slots
  if not contended then
    local within = not request.demoted and own(account, p) + n <= baseline_of(entitlement, p)
    local fills_up = protected
      or (within and not reserved and not BACKFILL[entitlement.service_class])
    if fills_up or used + n <= slots - terms.headroom then
      return {pool = p, spilled = false, contended = false}
    end
  elseif slots <= 0 or (not protected and (kv_full or used + n > slots + terms.spill_queue)) then
    for _, other in ipairs(request.alternates) do
      if idle_room(account, other, request) then
        return {pool = other, spilled = true, contended = false}
      end
    end
  end
  if reserved and (slots <= 0 or not protected) then
    if makes_way(account, p, request) then
      return {pool = p, spilled = false, contended = contended}
    end
    for _, other in ipairs(request.alternates) do
      if makes_way(account, other, request) then
        return {pool = other, spilled = other ~= p, contended = true}
      end
    end
  end
  if protected or slots <= 0 then return {pool = p, spilled = false, contended = true} end
  if not contended or (reserved and book.pools[p + 1].unreserved <= 0) then
    return {pool = p, spilled = false, contended = contended, denied = 'priority'}
  end
  return outranking(account, request, w, used)
end

local function tenant_of(account)
  return account.terms.tenant ~= '' and account.terms.tenant or account.name
end

-- Refused sequences that still wait, when `places` slots free up once per service time.
local function still_waiting(account, places, service_s)
  local gone = places * max(0, now_s - account.waiters_s) / max(1e-3, service_s)
  return max(0, account.waiters - gone)
end

-- Counts a refusal. Waits are capped at MOST_S, so the count is capped accordingly.
local function wait_too(account, sequences, places, service_s)
  local waiting = still_waiting(account, places, service_s) + sequences
  account.waiters = min(waiting, MOST_S * (places + 1) / max(1e-3, service_s))
  account.waiters_s = now_s
end

local function others_above(key, tenant, w)
  local count = call('ZCOUNT', key, w, '+inf')
  local own = call('ZSCORE', key, tenant)
  return own and tonumber(own) >= w and count - 1 or count
end

-- Whether a pool lately refused another tenant that comes before bursts beyond a rate.
local function sought(account, p)
  local tenant = tenant_of(account)
  local found = others_above(denials_of(p), tenant, BURST_WEIGHT)
  return found + others_above(denials_last_of(p), tenant, BURST_WEIGHT) > 0
end

-- Sequences ahead in the queue: the entitlement's own waiters, and each other tenant once.
local function before(account, p, w)
  local own = still_waiting(account, slots_of(p), book.pools[p + 1].service_s)
  local tenant = tenant_of(account)
  local others = others_above(denials_of(p), tenant, w)
  return own + others + others_above(denials_last_of(p), tenant, w)
end

local function pool_denial(account, request, w, place)
  local p = place.pool
  local pool, slots = book.pools[p + 1], slots_of(p)
  if place.denied == 'kv' then
    local capacity = kv_of(p)
    local short = pool.kv_bytes + request.kv_bytes - capacity
    local freed_per_s = max(1, pool.kv_bytes / max(1e-3, pool.service_s))
    return {'kv', short * (before(account, p, w) + 1) / freed_per_s, capacity, pool.kv_bytes,
      request.kv_bytes, 'bytes of KV cache', true}
  end
  local wait_s = (before(account, p, w) + 1) * pool.service_s / max(1, slots)
  return {'priority', wait_s, slots, occupied(account, p), request.sequences, 'sequences', true}
end

-- Check 4: r_e over all pools; guaranteed entitlements also to their baseline in each pool.
local function over_concurrency(account, request)
  local entitlement, inflight = account.terms, own(account, request.pool)
  local limit, used = most_sequences(account), account.total
  if entitlement.service_class == 'guaranteed' then
    local here = baseline_of(entitlement, request.pool)
    if inflight + request.sequences > here then limit, used = here, inflight end
  elseif limit == 0 then
    return nil
  end
  if used + request.sequences <= limit then return nil end
  local service_s = book.pools[request.pool + 1].service_s
  local wait_s = (still_waiting(account, used, service_s) + 1) * service_s / (used + 1)
  return {'concurrency', wait_s, limit, used, request.sequences, 'sequences', false}
end

-- A denial as scripts return it.
local function denied(denial) return {0, unpack(denial)} end
