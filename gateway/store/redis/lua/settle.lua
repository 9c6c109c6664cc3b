-- settle, version 7: ends a lease and charges it, once.
--
-- KEYS     see book.lua
-- arg      {lease_id, charge, timely, spent}: charge in tokens, false refunds all. timely: it ended
--          just now; otherwise its duration is unknown and updates no mean. spent: what budgets
--          count, {tokens, money}; nil or false for nothing.
--
-- Returns 1 if the lease was in force, else 0. The first usage reported after a lease expired
-- replaces its charged estimate. A transcription of gateway/admission/admission.py.

local function settle_late(id, charge, spent)
  local kept = call('HGET', GRAVES, id)
  if not kept then return 0 end
  local grave = unpacked(kept)
  if not grave[1] then return 0 end
  call('HDEL', GRAVES, id)
  call('ZREM', GRAVES_ORDER, id)
  if grave[4] then limits().more().correct(grave[4], spent) end
  local account = account_of(grave[1])
  if not account then return 0 end
  account.used = account.used - grave[2]
  correct(account, grave[3], grave[2], charge or 0)
  return 0
end

local function settle(id, charge, timely, spent)
  local lease = lease_of(id)
  if not lease then return settle_late(id, charge, spent) end
  local account = account_of(lease.entitlement)
  average(account)
  finish(account, lease, id)
  if lease.held then limits().settle(lease.held, spent) end
  if lease.adopted then bury(id, {false}) end
  local used = charge or 0
  correct(account, lease.funded, lease.estimate_tokens, used)
  if not charge then
    book.refunds = book.refunds + 1
    return 1
  end
  book.settled = book.settled + 1
  local pool = book.pools[lease.pool + 1]
  if timely then
    local life_s = max(0, now_s - lease.issued_s)
    pool.service_s = pool.service_s + MEAN_GAIN * (life_s - pool.service_s)
  end
  local cost = used / max(1, lease.sequences)
  if account.mean_cost > 0 then
    account.mean_cost = account.mean_cost + MEAN_GAIN * (cost - account.mean_cost)
  else
    account.mean_cost = cost
  end
  serve(account, lease.pool, lease.funded, used)
  return 1
end

return settle
