-- adopt, version 7: takes over leases that this server lost or never knew.
--
-- KEYS     see book.lua
-- ARGV[1]  {owner, leases}, 500 at most; a lease: {id, entitlement, pool, sequences,
--          estimate_tokens, kv_bytes, weight, spilled, issued_unix_s, held (limits.lua; or nil),
--          epoch (under which held was counted before; "" for never)}
--
-- Returns how many were taken over. Leases in force, and leases that were adopted and settled
-- before, are left alone, because the call may be a repetition. There are no checks: the engines
-- already run the requests. An expired lease takes its charge back.

local function own_or_none(account) return account.terms.tokens_per_s > 0 and 'own' or 'none' end

local function adopt(known)
  local account = account_of(known.entitlement)
  if not account or known.pool >= #book.pools or lease_of(known.id) then return 0 end
  local kept = call('HGET', GRAVES, known.id)
  local grave = kept and unpacked(kept)
  if grave and not grave[1] then return 0 end
  average(account)
  local lease = {
    entitlement = known.entitlement,
    pool = known.pool,
    sequences = known.sequences,
    estimate_tokens = known.estimate_tokens,
    kv_bytes = known.kv_bytes,
    weight = known.weight,
    issued_s = min(now_s, known.issued_unix_s),
    funded = own_or_none(account),
    owner = arg.owner,
    would_deny = '',
    spilled = known.spilled,
    evicted = false,
    adopted = true,
  }
  move(account, known.pool, known.sequences, known.kv_bytes)
  if grave then
    call('HDEL', GRAVES, known.id)
    call('ZREM', GRAVES_ORDER, known.id)
    account.used = account.used - grave[2]
    lease.estimate_tokens, lease.funded, lease.held = grave[2], grave[3], grave[4]
    if lease.held then limits().more().revive(lease.held) end
  else
    lease.held = known.held
    if lease.held then limits().more().adopt(lease.held, known.epoch) end
    pay(account, lease.funded, known.estimate_tokens)
    account.debited = account.debited + known.estimate_tokens
  end
  hold(account, lease, known.id)
  return 1
end

local failed = load_book()
if failed then return failed end
local count = 0
for _, known in ipairs(arg.leases) do count = count + adopt(known) end
save()
return count
