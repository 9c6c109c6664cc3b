-- resize, version 7: changes a lease's reservation. Never refused; its bucket pays.
--
-- KEYS     see book.lua
-- arg      {lease_id, estimate_tokens, kv_bytes}: the new reservation
--
-- Returns 1, or 0 if the lease is not in force.

return function(id, estimate_tokens, kv_bytes)
  local lease = lease_of(id)
  if not lease then return 0 end
  local account = account_of(lease.entitlement)
  average(account)
  local more = estimate_tokens - lease.estimate_tokens
  local more_bytes = kv_bytes - lease.kv_bytes
  lease.estimate_tokens = estimate_tokens
  lease.kv_bytes = kv_bytes
  keep(lease, id)
  pay(account, lease.funded, more)
  if more >= 0 then
    account.debited = account.debited + more
  else
    account.refunded = account.refunded - more
  end
  move(account, lease.pool, 0, more_bytes)
  return 1
end
