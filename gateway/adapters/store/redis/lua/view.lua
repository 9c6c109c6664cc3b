-- view, version 5: counters, for people and metrics; changes nothing.
--
-- KEYS     see book.lua
-- ARGV[1]  {names}
--
-- Returns {terms, book, then of each name its terms and its counters}, msgpack maps, "" for absent.

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
