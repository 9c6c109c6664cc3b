-- view, version 7: reads counters, for the admin API and metrics; changes nothing.
--
-- KEYS     see book.lua
-- ARGV[1]  {names}
--
-- Returns {terms, book, then each name's terms and counters}, as msgpack maps; "" if absent.

local failed = load_book()
if failed then return failed end
local reply = {pack(terms), pack(book)}
for _, name in ipairs(arg.names) do
  local account = account_of(name)
  local entitlement = account and account.terms
  if account then account.terms, account.name = nil, nil end
  reply[#reply + 1] = account and pack(entitlement) or ''
  reply[#reply + 1] = account and pack(account) or ''
end
return reply
