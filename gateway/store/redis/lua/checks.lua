-- checks, version 7: the checks of admission. With place.lua, made only if the fast path fails.
--
-- A transcription of gateway/admission/checks.py, and of the part of admission.py that
-- records refusals.

local function not_in_force(entitlement)
  if entitlement.suspended then
    return {'entitlement_suspended', 0, 0, 0, 0, 'sequences', false}
  end
  if entitlement.expires_unix_s > 0 and entitlement.expires_unix_s <= now_s then
    return {'entitlement_expired', 0, 0, 0, 0, 'sequences', false}
  end
  return nil
end

-- The denial of a request within a baseline that its pool does not hold now.
local function unbound(entitlement)
  local once = entitlement.created <= terms.ever_bound_until
  local reason = once and 'entitlement_degraded' or 'entitlement_pending'
  return {reason, BUCKET_S, 0, 0, 0, 'sequences', false}
end

local function never(unit, limit, requested)
  return {'exceeds_entitlement', 0, limit, 0, requested, unit, false}
end

-- Denies a request that no eligible pool could hold even when empty. A pool may be away and return.
local function too_large_for_pools(request)
  local pools = {request.pool}
  for _, p in ipairs(request.alternates) do pools[#pools + 1] = p end
  local room, anybody, kv_room, everywhere = 0, false, 0, true
  for _, p in ipairs(pools) do
    room = max(room, slots_of(p) + overshoot(slots_of(p)))
    anybody = anybody or slots_of(p) > 0
    kv_room = max(kv_room, kv_of(p))
    everywhere = everywhere and kv_of(p) > 0
  end
  if request.sequences > room and anybody then
    return never('sequences', room, request.sequences)
  end
  if everywhere and request.kv_bytes > kv_room then
    return never('bytes of KV cache', kv_room, request.kv_bytes)
  end
  return nil
end

-- Check 3: requests that could never be admitted, however long they wait.
local function misfit(account, request)
  local entitlement = account.terms
  local class = entitlement.service_class
  local guaranteed = class == 'guaranteed'
  local most = guaranteed and baseline_of(entitlement, request.pool) or entitlement.limit
  if request.sequences > most and (most > 0 or guaranteed) then
    return never('sequences', most, request.sequences)
  end
  local depth = 0
  if entitlement.tokens_per_s > 0 then
    depth = depth_tokens(account)
  elseif BORROWING[class] then
    depth = surplus_depth()
  end
  if depth > 0 and depth < request.estimate_tokens then
    return never('tokens', depth, request.estimate_tokens)
  end
  local most_kv = kv_limit(entitlement)
  if most_kv > 0 and most_kv < request.kv_bytes then
    return never('bytes of KV cache', most_kv, request.kv_bytes)
  end
  if request.sequences == 1 and request.kv_bytes <= kv_of(request.pool) then return nil end
  return too_large_for_pools(request)
end

local function may_borrow(account, tokens)
  local entitlement = account.terms
  if entitlement.tokens_per_s_limit <= 0 then return true end
  local rate = entitlement.tokens_per_s_limit - entitlement.tokens_per_s
  if rate <= 0 then return false end
  local recent = recently_borrowed(account)
  return recent <= 0 or recent + tokens <= BUCKET_S * rate
end

-- Check 5: what pays: own, surplus or none (no rate is set); nil if neither can. Where pools state
-- no rate, the surplus is what slots and KV have free.
local function funded_by(account, tokens)
  local entitlement = account.terms
  local borrows, stated = BORROWING[entitlement.service_class], terms.tokens_per_s > 0
  if entitlement.tokens_per_s > 0 then
    local level = own_level(account, depth_tokens(account))
    if level >= tokens then return 'own' end
    if not borrows or (stated and level < 0) then return nil end
  elseif not borrows or not (stated or entitlement.tokens_per_s_limit > 0) then
    return 'none'
  end
  if stated and surplus_level() < tokens then return nil end
  return may_borrow(account, tokens) and 'surplus' or nil
end

-- Whether a request is beyond its entitlement's rate, with only free slots and KV to pay.
local function bursts(account, request, funded)
  local beyond = funded == 'surplus' and account.terms.tokens_per_s > 0
  return beyond and terms.tokens_per_s <= 0 and not within_reserve(account, request)
end

local function refill_per_s(entitlement)
  if entitlement.tokens_per_s > 0 then return entitlement.tokens_per_s end
  return book.surplus_per_s > 0 and book.surplus_per_s or entitlement.tokens_per_s_limit
end

local function over_rate(account, request)
  local rate, level, limit = refill_per_s(account.terms), account.level, nil
  if account.terms.tokens_per_s > 0 then
    limit = depth_tokens(account)
  elseif terms.tokens_per_s > 0 then
    level, limit = book.surplus, surplus_depth()
  else
    limit = max(BUCKET_S * rate, request.estimate_tokens)
    level = limit - recently_borrowed(account)
  end
  local wait_s = MOST_S
  if rate > 0 then
    local kept = max(0, account.promised - rate * max(0, now_s - account.promised_s))
    wait_s = (request.estimate_tokens - level + kept) / rate
  end
  return {'tokens', wait_s, limit, limit - level, request.estimate_tokens, 'tokens', false}
end

-- Check 6: chi_e over all pools.
local function over_kv(account, request)
  local limit = kv_limit(account.terms)
  local held = account.kv_bytes
  local short = held + request.kv_bytes - limit
  if limit == 0 or short <= 0 then return nil end
  local service_s = book.pools[request.pool + 1].service_s
  local waiting = still_waiting(account, account.total, service_s)
  local freed_per_s = max(1, held / max(1e-3, service_s))
  local wait_s = short * (waiting + 1) / freed_per_s
  return {'kv', wait_s, limit, held, request.kv_bytes, 'bytes of KV cache', false}
end

-- Checks 1-8: the denial if any, the place, the bucket that pays, and the weight.
local function decide(account, request, w)
  local denial = not_in_force(account.terms) or misfit(account, request)
    or over_concurrency(account, request)
  if denial then return denial end
  local funded = funded_by(account, request.estimate_tokens)
  if not funded then return over_rate(account, request) end
  denial = over_kv(account, request)
  if denial then return denial end
  local bursting = bursts(account, request, funded)
  if bursting then w = min(w, BURST_WEIGHT) end
  local place = find_place(account, request, w)
  if bursting and (place.denied or sought(account, place.pool)) then
    return over_rate(account, request)
  end
  if not place.denied then return nil, place, funded, w end
  if within_reserve(account, request) then return unbound(account.terms) end
  return pool_denial(account, request, w, place)
end

-- Whether more workers would have let a request in, so that it counts as demand for them.
local function lacks_capacity(account, request, denial)
  local entitlement, reason = account.terms, denial[1]
  if reason == 'tokens' then
    return BORROWING[entitlement.service_class] and may_borrow(account, request.estimate_tokens)
  elseif reason == 'concurrency' then
    return entitlement.limit == 0 and entitlement.service_class ~= 'guaranteed'
  end
  return denial[7]
end

-- Records demand, and this refusal's promised wait, so that the next one gets a longer wait.
local function refused(account, request, w, denial)
  local reason, of_pool, pool = denial[1], denial[7], book.pools[request.pool + 1]
  if lacks_capacity(account, request, denial) then
    pool.refused_sequences = pool.refused_sequences + request.sequences
    pool.refused_kv_bytes = pool.refused_kv_bytes + request.kv_bytes
    pool.refused_tokens = pool.refused_tokens + request.estimate_tokens
  end
  if of_pool then
    local denials, tenant = denials_of(request.pool), tenant_of(account)
    call('ZREM', denials_last_of(request.pool), tenant)
    call('ZREM', denials, tenant)
    if call('ZCARD', denials) < DENIALS_KEPT then call('ZADD', denials, w, tenant) end
    wait_too(account, request.sequences, slots_of(request.pool), pool.service_s)
    if could_outrank(request) then -- otherwise debt could not help
      account.denied = account.denied + 1
      account.denied_seconds = account.denied_seconds + request.sequences * pool.service_s
      account.denied_kv_seconds = account.denied_kv_seconds + request.kv_bytes * pool.service_s
      book.priority_denials = book.priority_denials + 1
      call('SADD', ACTIVE, account.name)
    end
  elseif reason == 'tokens' then
    -- Waits are capped at MOST_S, so promises are, too.
    local rate = refill_per_s(account.terms)
    local kept = max(0, account.promised - rate * max(0, now_s - account.promised_s))
    account.promised = min(kept + request.estimate_tokens, MOST_S * rate)
    account.promised_s = now_s
  elseif reason == 'concurrency' or reason == 'kv' then
    wait_too(account, request.sequences, account.total, pool.service_s)
  end
end

return {
  decide = decide, refused = refused, denied = denied, over_concurrency = over_concurrency,
  find_place = find_place, pool_denial = pool_denial,
}
