-- adopt, version 7: takes over leases that this server lost or never knew.
--
-- KEYS     see book.lua
-- ARGV[1]  {owner, limits, leases}. limits: the hash of limits' counters; leases: 500 pairs at most
--          of a LeaseRecord's fields (gateway/admission/terms.py), and the epoch under which what it
--          holds of limits was counted before ("" for never)
--
-- Returns how many were taken over. Leases in force, and leases that were adopted and settled
-- before, are left alone, because the call may be a repetition. There are no checks: the engines
-- already run the requests. An expired lease takes its charge back.

local function own_or_none(account) return account.terms.tokens_per_s > 0 and 'own' or 'none' end

local function adopt(lease, epoch)
  local id, account = lease.id, account_of(lease.entitlement)
  if not account or lease.pool >= #book.pools or lease_of(id) then return 0 end
  local kept = call('HGET', GRAVES, id)
  local grave = kept and unpacked(kept)
  if grave and not grave[1] then return 0 end
  average(account)
  lease.issued_s, lease.funded = min(now_s, lease.issued_s), own_or_none(account)
  lease.owner, lease.would_deny, lease.evicted, lease.adopted = arg.owner, '', false, true
  move(account, lease.pool, lease.sequences, lease.kv_bytes)
  if grave then
    call('HDEL', GRAVES, id)
    call('ZREM', GRAVES_ORDER, id)
    account.used = account.used - grave[2]
    lease.estimate_tokens, lease.funded, lease.held = grave[2], grave[3], grave[4]
    if lease.held then limits().more().revive(lease.held) end
  else
    lease.held = lease.held[1] and {arg.limits, unpack(lease.held)}
    if lease.held then limits().more().adopt(lease.held, epoch) end
    pay(account, lease.funded, lease.estimate_tokens)
    account.debited = account.debited + lease.estimate_tokens
  end
  hold(account, lease, id)
  return 1
end

local failed = load_book()
if failed then return failed end
local count = 0
for _, given in ipairs(arg.leases) do count = count + adopt(given[1], given[2]) end
save()
return count
