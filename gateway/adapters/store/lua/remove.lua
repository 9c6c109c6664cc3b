-- remove, version 3: forgets an entitlement that has nothing in flight.
--
-- KEYS     see book.lua
-- ARGV[1]  {name}
--
-- Returns 1, or 0 while it has anything in flight.

local failed = load_book()
if failed then return failed end
local account = account_of(arg.name)
if account then
  if account.total > 0 then return 0 end
  reserve(account, -1)
  accounts[arg.name] = nil
  save()
end
call('HDEL', DEFS, arg.name)
call('HDEL', ACCOUNTS, arg.name)
call('SREM', ACTIVE, arg.name)
call('SREM', TICKING, arg.name)
call('ZREM', DEDICATED, arg.name)
return 1
