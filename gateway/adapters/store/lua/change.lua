-- change, version 2: takes over a model's capacity and rules.
--
-- KEYS     see book.lua
-- ARGV[1]  {owner, leader_ms, terms (map), epoch}: only the leader's terms count, and those
--          of whoever finds the model unknown: it begins then, under this epoch.
--
-- Returns 1 when they were taken over.

-- Counts the idle baselines of the dedicated entitlements created after one and up to another.
local function reserve_between(low, high, sign)
  local after = '(' .. string.format('%.17g', low)
  for _, name in ipairs(call('ZRANGEBYSCORE', DEDICATED, after, high)) do
    local account = account_of(name)
    if account then reserve(account, sign) end
  end
end

local failed = load_book()
if failed and book then return failed end
local existed = not failed
if existed and call('GET', LEADER) ~= arg.owner
  and not call('SET', LEADER, arg.owner, 'NX', 'PX', arg.leader_ms) then
  return 0
end
local given = arg.terms
local old, new = -1, given.bound_until
if existed then
  old = terms.bound_until
  local more_per_s = given.tokens_per_s - terms.tokens_per_s
  book.surplus_per_s = max(0, book.surplus_per_s + more_per_s)
else
  terms = given
  book = {
    pools = {}, surplus = 0, surplus_s = 0, surplus_per_s = given.tokens_per_s, own_served = 0,
    priority_denials = 0, ticked_s = now_s, settled = 0, refunds = 0, serial = 0, epoch = arg.epoch,
  }
end
for i = 1, #given.slots do book.pools[i] = book.pools[i] or new_pool() end
if new < old then reserve_between(new, old, -1) end
terms = given
if new > old then reserve_between(old, new, 1) end
call('HSET', STATE, 'terms', pack(terms))
save()
return 1
