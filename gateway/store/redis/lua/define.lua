-- define, version 7: adds entitlements or changes their terms; counters stay.
--
-- KEYS     see book.lua
-- ARGV[1]  {entitlements}, 500 at most: a list of {name, terms (map)}
--
-- Returns the number of entitlements. The model itself may be defined later, by change.lua.

local failed = load_book()
if failed and book then return failed end
for _, given in ipairs(arg.entitlements) do
  local name = given[1]
  local account = not failed and call('HEXISTS', DEFS, name) == 1 and account_of(name)
  if account then reserve(account, -1) end
  local entitlement = given[2]
  call('HSET', DEFS, name, PACKED_entitlement(entitlement))
  if entitlement.service_class == 'dedicated' then
    call('ZADD', DEDICATED, entitlement.created, name)
  else
    call('ZREM', DEDICATED, name)
  end
  if account then
    local reserves = RESERVING[entitlement.service_class]
    if reserves ~= RESERVING[account.terms.service_class] then
      for i, pool in ipairs(book.pools) do
        pool.unreserved = pool.unreserved + (reserves and -1 or 1) * account.inflight[i]
      end
    end
    account.terms = entitlement
    if entitlement.service_class ~= 'elastic' then account.debt = 0 end
    reserve(account, 1)
  elseif not failed then
    reserve(account_of(name), 1)
    accounts[name] = nil -- all zero
  end
end
if not failed then save() end
return #arg.entitlements
