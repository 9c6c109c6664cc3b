-- checks, version 6: the checks of admission. With place.lua, made only if the fast path fails.
--
-- A transcription of gateway/policy/admission/limits.py, and of the part of admission.py that
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
  local kv_limit = entitlement.kv_bytes_limit
  if kv_limit == 0 then kv_limit = entitlement.kv_bytes end
  if kv_limit > 0 and kv_limit < request.kv_bytes then
    return never('bytes of KV cache', kv_limit, request.kv_bytes)
  end
  if request.sequences == 1 and request.kv_bytes <= kv_of(request.pool) then return nil end
  return too_large_for_pools(request)
end

local function may_borrow(account, tokens)
  local entitlement = account.terms
  if entitlement.tokens_per_s_limit <= 0 then return true end
  local rate = entitlement.tokens_per_s_limit - entitlement.tokens_per_s
  if rate <= 0 then return false end
  local recent = max(0, account.borrowed - rate * max(0, now_s - account.borrowed_s))
  return recent <= 0 or recent + tokens <= BUCKET_S * rate
end

-- Check 5: the bucket that pays: own, surplus or none (no rate is set); nil if neither can.
local function funded_by(account, tokens)
  local entitlement = account.terms
  local borrows = BORROWING[entitlement.service_class] and terms.tokens_per_s > 0
  if entitlement.tokens_per_s > 0 then
    local level = own_level(account, depth_tokens(account))
    if level >= tokens then return 'own' end
    if level < 0 or not borrows then return nil end
  elseif not borrows then
    return 'none'
  end
  if surplus_level() >= tokens and may_borrow(account, tokens) then return 'surplus' end
  return nil
end

local function over_rate(account, request)
  local rate, level, limit = account.terms.tokens_per_s, account.level, nil
  if rate > 0 then
    limit = depth_tokens(account)
  else
    rate, level, limit = book.surplus_per_s, book.surplus, surplus_depth()
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
  local limit = account.terms.kv_bytes_limit
  if limit == 0 then limit = account.terms.kv_bytes end
  local held = account.kv_bytes
  local short = held + request.kv_bytes - limit
  if limit == 0 or short <= 0 then return nil end
  local service_s = book.pools[request.pool + 1].service_s
  local waiting = still_waiting(account, account.total, service_s)
  local freed_per_s = max(1, held / max(1e-3, service_s))
  local wait_s = short * (waiting + 1) / freed_per_s
  return {'kv', wait_s, limit, held, request.kv_bytes, 'bytes of KV cache', false}
end

-- Checks 1-8: the denial if any, the place, and the bucket that pays.
local function decide(account, request, w)
  local denial = not_in_force(account.terms) or misfit(account, request)
    or over_concurrency(account, request)
  if denial then return denial end
  local funded = funded_by(account, request.estimate_tokens)
  if not funded then return over_rate(account, request) end
  denial = over_kv(account, request)
  if denial then return denial end
  local place = find_place(account, request, w)
  if not place.denied then return nil, place, funded end
  if within_reserve(account, request) then return unbound(account.terms) end
  return pool_denial(account, request, w, place)
end

-- Records this refusal's promised wait, so that the next one gets a longer wait.
local function refused(account, request, w, denial)
  local reason, of_pool = denial[1], denial[7]
  if of_pool then
    local denials, tenant = denials_of(request.pool), tenant_of(account)
    call('ZREM', denials_last_of(request.pool), tenant)
    call('ZREM', denials, tenant)
    if call('ZCARD', denials) < DENIALS_KEPT then call('ZADD', denials, w, tenant) end
    local pool = book.pools[request.pool + 1]
    pool.denied = pool.denied + 1
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
    local rate = account.terms.tokens_per_s
    if rate == 0 then rate = book.surplus_per_s end
    local kept = max(0, account.promised - rate * max(0, now_s - account.promised_s))
    account.promised = min(kept + request.estimate_tokens, MOST_S * rate)
    account.promised_s = now_s
  elseif reason == 'concurrency' or reason == 'kv' then
    wait_too(account, request.sequences, account.total, book.pools[request.pool + 1].service_s)
  end
end

return {
  decide = decide, refused = refused, denied = denied, over_concurrency = over_concurrency,
  find_place = find_place, pool_denial = pool_denial,
}
