-- remove, version 7: forgets an entitlement that has nothing in flight.
--
-- KEYS     see book.lua
-- ARGV[1]  {name}
--
-- Returns 1, or 0 while it has anything in flight.

-- Forgets its expired leases, so that their late usage is not charged to a later entitlement of
-- the same name. A tombstone begins with the name, so none of up to 10,000 has to be unpacked.
local function forget_graves(name)
  local named = pack(name)
  local kept = call('HGETALL', GRAVES)
  for i = 1, #kept, 2 do
    if string.sub(kept[i + 1], 2, 1 + #named) == named then
      call('HDEL', GRAVES, kept[i])
      call('ZREM', GRAVES_ORDER, kept[i])
    end
  end
end

local failed = load_book()
if failed then return failed end
local account = account_of(arg.name)
if account then
  if account.total > 0 then return 0 end
  reserve(account, -1)
  accounts[arg.name] = nil
  save()
end
forget_graves(arg.name)
call('HDEL', DEFS, arg.name)
call('HDEL', ACCOUNTS, arg.name)
call('SREM', ACTIVE, arg.name)
call('SREM', TICKING, arg.name)
call('ZREM', DEDICATED, arg.name)
return 1
