-- change, version 7: sets a model's capacity and rules.
--
-- KEYS     see book.lua
-- ARGV[1]  {owner, leader_ms, terms (map), epoch}: only the leader's terms count. If the model is
--          unknown, any replica's do, and the model starts under this epoch.
--
-- Returns 1 if the terms were set, else 0.

local function new_pool()
  return {
    inflight = 0, kv_bytes = 0, idle_dedicated = 0, unreserved = 0, service_s = FIRST_SERVICE_S,
    refused_sequences = 0, refused_kv_bytes = 0, refused_tokens = 0, served_tokens = 0,
  }
end

-- Updates a pool's idle baselines for dedicated entitlements that are newly bound or unbound.
local function rebind(p, old, new)
  local pool = book.pools[p + 1]
  local after = '(' .. string.format('%.17g', min(old, new))
  local upto = string.format('%.17g', max(old, new))
  for _, name in ipairs(call('ZRANGEBYSCORE', DEDICATED, after, upto)) do
    local account = account_of(name)
    local idle = account and idle_of(account, p) or 0
    pool.idle_dedicated = pool.idle_dedicated + (new > old and idle or -idle)
  end
end

local failed = load_book()
if failed and book then return failed end
local existed = not failed
if existed and call('GET', LEADER) ~= arg.owner
  and not call('SET', LEADER, arg.owner, 'NX', 'PX', arg.leader_ms) then
  return 0
end
local given = arg.terms
if existed then
  local more_per_s = given.tokens_per_s - terms.tokens_per_s
  book.surplus_per_s = max(0, book.surplus_per_s + more_per_s)
else
  terms = given
  book = {
    pools = {}, surplus = 0, surplus_s = 0, surplus_per_s = given.tokens_per_s, own_served = 0,
    priority_denials = 0, ticked_s = now_s, settled = 0, refunds = 0, serial = 0, epoch = arg.epoch,
    reap_at_s = 0,
  }
  -- From here on jumps of the clock are limited, even before the first tick.
  if read_s then call('HSET', STATE, 'clock', string.format('%.6f %.6f', read_s, now_s)) end
end
for i = 1, #given.slots do book.pools[i] = book.pools[i] or new_pool() end
local before = existed and terms
terms = given
for p = 0, #given.slots - 1 do
  rebind(p, before and (before.bound_until[p + 1] or UNLIMITED) or -1, bound_in(p))
end
terms.profile = PACKED_profile(terms.profile)
call('HSET', STATE, 'terms', PACKED_terms(terms))
save()
return 1
