-- renew, version 7: keeps leases in force for another term.
--
-- KEYS     see book.lua
-- ARGV[1]  {lease_ids}, 500 at most
--
-- Returns the ids of the leases that are no longer in force.

local failed = load_book()
if failed then return failed end
local gone = {}
for _, id in ipairs(arg.lease_ids) do
  local lease = lease_of(id)
  if lease then
    call('ZREM', EXPIRY, lease.serial .. id)
    put_off(lease, id)
    keep(lease, id)
  else
    gone[#gone + 1] = id
  end
end
save()
return gone
