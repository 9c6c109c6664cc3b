-- transfer, version 7: moves a lease to another pool; after a denial the old place stays in force.
--
-- KEYS     see book.lua
-- arg      {lease_id, pool, force}; without force, only if that pool admits it
--
-- Returns msgpack {evictable} if it moved, was there already or is not in force, else {false,
-- denial} as of admit. A denial is not recorded as a refusal, because the request continues where
-- it was.
--
-- A transcription of gateway/admission/admission.py.

-- Checks 4, 7 and 8 for a lease from another pool.
local function inadmissible(account, lease, p)
  local request = {
    pool = p,
    alternates = {},
    estimate_tokens = lease.estimate_tokens,
    kv_bytes = lease.kv_bytes,
    sequences = lease.sequences,
  }
  local denial = checks().over_concurrency(account, request)
  if denial then return denial end
  local place = checks().find_place(account, request, lease.weight)
  if slots_of(p) <= 0 then place = {pool = p, contended = true, denied = 'priority'} end
  return place.denied and checks().pool_denial(account, request, lease.weight, place)
end

local function transfer(id, p, force)
  local lease = lease_of(id)
  if not lease then return pack({false}) end
  if lease.pool == p then
    return pack({call('ZSCORE', evictable_of(p), id) and true or false})
  end
  local account = account_of(lease.entitlement)
  average(account)
  release(account, lease, id)
  local denial = not force and inadmissible(account, lease, p)
  if not denial then lease.pool = p end
  move(account, lease.pool, lease.sequences, lease.kv_bytes)
  file(account, lease, id)
  keep(lease, id)
  if denial then return pack({false, checks().denied(denial)}) end
  return pack({gives_way(account, lease)})
end

return transfer
