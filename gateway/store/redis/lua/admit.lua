-- admit, version 7: decides whether a request is admitted, and takes the lease.
--
-- KEYS     see book.lua
-- arg      {lease_id, owner, observe, entitlement, pool, alternates (pools), estimate_tokens,
--          kv_bytes, sequences, asked, dry, demoted}. observe: the model's setting; denials are only noted.
--          asked: limits of the key, entitlement and tenant (limits.lua); nil for none.
--          dry: nil, or for a quote, which takes and records nothing, the limits of requests (as
--          asked) in which it counts itself. demoted: it gets leftovers only.
--
-- Returns msgpack {decision, evictable, issued_unix_s}. The decision has the fields of a Grant after
-- a 1, or those of a Denial after a 0 (gateway/admission/terms.py). A held lease id gets its
-- existing grant. Of a denied quote `evictable` says whether one of its own limits denied it.
--
-- A transcription of gateway/admission/admission.py.

-- Whether all checks would surely pass (a fast path of the scripts alone). False is no decision.
local function comes_in(account, request)
  local entitlement, p, most = account.terms, request.pool, most_sequences(account)
  if entitlement.tokens_per_s <= 0 or request.sequences ~= 1 or entitlement.suspended
    or (0 < entitlement.expires_unix_s and entitlement.expires_unix_s <= now_s)
    or (most > 0 and account.total >= most) then
    return false
  end
  if RESERVING[entitlement.service_class] then
    if not bound(entitlement, p) then return false end
    if entitlement.service_class == 'guaranteed'
      and account.inflight[p + 1] >= baseline_of(entitlement, p) then
      return false
    end
  end
  local limit = kv_limit(entitlement)
  if 0 < limit and limit < account.kv_bytes + request.kv_bytes then return false end
  local pool, capacity = book.pools[p + 1], kv_of(p)
  if pool.idle_dedicated ~= 0 or pool.inflight >= slots_of(p) - terms.headroom
    or (0 < capacity and capacity < pool.kv_bytes + request.kv_bytes) then
    return false
  end
  local depth = depth_tokens(account)
  return request.estimate_tokens <= depth and own_level(account, depth) >= request.estimate_tokens
end

local function granted(account, lease, contended, evictable, uses)
  local entitlement, p = account.terms, lease.pool
  local limit, used = most_sequences(account), account.total
  local protected = false
  if RESERVING[entitlement.service_class] then
    local here = own(account, p)
    protected = not lease.spilled and here <= baseline_of(entitlement, p)
    if entitlement.service_class == 'guaranteed' then
      limit, used = baseline_of(entitlement, p), here
    end
  end
  local grant = {1, p, lease.weight, lease.spilled, contended, protected, lease.funded,
    lease.would_deny, limit, used, entitlement.tokens_per_s > 0 and depth_tokens(account) or 0,
    account.level, entitlement.tokens_per_s, book.pools[p + 1].service_s,
    lease.held and {unpack(lease.held, 2)}, uses}
  return pack({grant, evictable, lease.issued_s})
end

local function admit(id, owner, observe, entitlement, pool, alternates, tokens, kv_bytes, sequences,
  asked, dry, demoted)
  local request = {
    entitlement = entitlement, pool = pool, alternates = alternates, estimate_tokens = tokens,
    kv_bytes = kv_bytes, sequences = sequences, demoted = demoted,
  }
  if dry and #dry > 1 then
    local counted = limits().read(dry)
    local over = limits().weigh(counted, 0)
    if over then return pack({checks().denied(over), true, 0}) end
    limits().reserve(counted)
  end
  reap(REAPED_AT_ONCE)
  local account = account_of(request.entitlement)
  if not account then
    return pack({checks().denied({'entitlement_unknown'}), false, 0})
  end
  local held = lease_of(id)
  if held then
    local evictable = call('ZSCORE', evictable_of(held.pool), id) and true or false
    return granted(account_of(held.entitlement), held, false, evictable)
  end
  average(account)
  local w = weight_now(account)
  local denial, place, funded = nil, {pool = request.pool, spilled = false, contended = false}, 'own'
  local known
  if asked then
    known = limits().read(asked)
    local over
    denial, over = limits().weigh(known, book.pools[pool + 1].service_s)
    request.demoted = demoted or over
  end
  if request.demoted then w = min(w, SPILLED_WEIGHT) end
  if not denial and (request.demoted or not comes_in(account, request)) then
    local weight
    denial, place, funded, weight = checks().decide(account, request, w)
    w = weight or w
  end
  local would_deny = ''
  if denial then
    if not dry then checks().refused(account, request, w, denial) end
    if not (observe or account.terms.observe) then
      return pack({checks().denied(denial), false, 0})
    end
    would_deny = denial[1]
    place = {pool = request.pool, spilled = false, contended = false}
    funded = 'none' -- no bucket pays for a request that would have been refused
  end
  local spilled = place.spilled or request.demoted == true and would_deny == ''
  local lease = {
    entitlement = request.entitlement,
    pool = place.pool,
    sequences = request.sequences,
    estimate_tokens = request.estimate_tokens,
    kv_bytes = request.kv_bytes,
    weight = spilled and min(w, SPILLED_WEIGHT) or w,
    issued_s = now_s,
    funded = funded,
    owner = owner,
    would_deny = would_deny,
    spilled = spilled,
    evicted = false,
  }
  if dry then return granted(account, lease, place.contended, false) end
  local uses
  if known then lease.held, uses = limits().reserve(known) end
  hold(account, lease, id)
  move(account, place.pool, request.sequences, request.kv_bytes)
  if funded == 'own' then
    account.level = account.level - request.estimate_tokens -- check 5 filled it and found enough
  else
    pay(account, funded, request.estimate_tokens)
  end
  account.debited = account.debited + request.estimate_tokens
  return granted(account, lease, place.contended, gives_way(account, lease), uses)
end

return admit
