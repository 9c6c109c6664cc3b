-- evict, version 7: marks leases in a waiting lease's pool for eviction; a transcription of
-- gateway/admission/admission.py.
--
-- KEYS     see book.lua
-- ARGV[1]  {lease_id, sequences, owner}: the waiting lease and the sequences that it needs
--
-- Returns the ids of the victims that the caller owns; other owners ask for theirs (evicted.lua).
-- A victim's lease stays in force until its owner settles it.

local function candidates(p)
  local found, leaving = {}, 0
  local ids = call('ZRANGE', evictable_of(p), 0, -1)
  for _, id in ipairs(ids) do
    local lease = lease_of(id)
    if lease.evicted then
      leaving = leaving + lease.sequences
    elseif gives_way(account_of(lease.entitlement), lease) then
      found[#found + 1] = {id = id, lease = lease}
    end
  end
  table.sort(found, function(a, b)
    if a.lease.weight ~= b.lease.weight then return a.lease.weight < b.lease.weight end
    if a.lease.issued_s ~= b.lease.issued_s then return a.lease.issued_s > b.lease.issued_s end
    return a.id < b.id
  end)
  return found, leaving
end

local failed = load_book()
if failed then return failed end
local waiting = lease_of(arg.lease_id)
if not waiting then return {} end
local p = waiting.pool
local found, leaving = candidates(p)
local over = book.pools[p + 1].inflight - leaving - slots_of(p)
local wanted = max(0, min(arg.sequences, over))
local own, freed = {}, 0
for _, victim in ipairs(found) do
  if freed >= wanted then break end
  freed = freed + victim.lease.sequences
  victim.lease.evicted = true
  keep(victim.lease, victim.id)
  if victim.lease.owner == arg.owner then
    own[#own + 1] = victim.id
  else
    call('ZADD', EVICTIONS, 0, victim.lease.owner .. '\0' .. victim.id)
  end
end
return own
