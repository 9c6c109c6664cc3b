-- limits, version 7: limits of keys, entitlements and tenants, over all models. Made only for
-- requests that have any. A transcription of gateway/admission/limit_book.py.
--
-- All counters are fields of one hash, whose name comes with each call: models without limits
-- need no further key. A counter is a msgpack list: the fields below, then the slices' starts and
-- amounts in turn, ascending. Of a limit of sequences only RESERVED is used. `clock` has the time
-- of all limits, as book_time keeps a model's; tick.lua advances it.
--
-- RESERVED has the sum over a model's leases by the model's epoch, because either half may be lost:
-- a number if it is all of the epoch OF, else a map. `models` has for each model {epoch, time of
-- its last tick, its epoch before}. What epochs that are not in there reserved is dropped (heal); a
-- model that is not counts its leases (tick.lua).
--
-- asked    {hash, {wanted, {id, unit, amount, step_s, start_s, next_s, kept_s, warn, spot}, most}
--          ...}; most: what the lease reserves
-- held     of a lease: {hash, {id, unit, slice_s, amount, expected} ...}

local TOTAL, RESERVED, WARNED_S, ADDED, ADDED_UNTIL_S, OF, SLICES = 1, 2, 3, 4, 5, 6, 7
local now_s, timed = now_s, not read_s -- of limits, once counters were read

-- What few requests need is made for those alone, because every run makes all functions anew.
local made_more, make_more
local function more()
  made_more = made_more or make_more()
  return made_more
end

local function counters_of(hash, ids)
  if not timed then
    timed = true
    local clock = call('HGET', hash, 'clock')
    if clock then now_s = steady(clock, read_s) end
  end
  local kept = call('HMGET', hash, unpack(ids))
  for i = 1, #ids do
    kept[i] = kept[i] and unpacked(kept[i]) or {0, 0, -1, 0, 0, ''}
  end
  return kept
end

local function counters_held(held)
  local ids = {}
  for i = 2, #held do ids[i - 1] = held[i][1] end
  return counters_of(held[1], ids), ids
end

local function save_counters(hash, ids, counters)
  local written = {}
  for i, id in ipairs(ids) do
    written[#written + 1] = id
    written[#written + 1] = pack(counters[i])
  end
  call('HSET', hash, unpack(written))
end

local function reserved_of(counter)
  local reserved, sum = counter[RESERVED], 0
  if type(reserved) == 'number' then return reserved end
  for _, amount in pairs(reserved) do sum = sum + amount end
  return sum
end

-- Changes what the model reserves; a counter begun anew does not know what ends.
local function hold(counter, amount)
  local reserved = counter[RESERVED]
  if reserved == 0 or (counter[OF] == book.epoch and type(reserved) == 'number') then
    counter[RESERVED], counter[OF] = max(0, reserved + amount), book.epoch
  else
    more().hold(counter, amount)
  end
end

local function level(counter, since_s)
  local used = 0
  for i = #counter - 1, SLICES, -2 do
    if counter[i] < since_s then break end
    used = used + counter[i + 1]
  end
  return used
end

local function allowed(counter, amount)
  return now_s < counter[ADDED_UNTIL_S] and amount + counter[ADDED] or amount
end

-- What a slice after the newest counted is in the newest now (see roll).
local function post(counter, slice_s, amount)
  counter[TOTAL] = counter[TOTAL] + amount
  local newest = #counter - 1
  for i = newest, SLICES, -2 do
    if counter[i] == slice_s or (i == newest and counter[i] < slice_s) then
      counter[i + 1] = max(0, counter[i + 1] + amount)
      return
    end
  end
end

local function roll(counter, limit)
  local start_s = now_s < limit.next_s and limit.start_s or limit.next_s
  if limit.step_s > 0 then start_s = math.floor(now_s / limit.step_s) * limit.step_s end
  local newest, early = #counter - 1, nil
  if newest >= SLICES and counter[newest] > now_s then
    early = more().recall(counter, limit, start_s)
    newest = #counter - 1
  end
  if start_s > now_s then -- the gateway's clock is wrong: it does not know the current slice
    start_s = newest >= SLICES and counter[newest] or now_s
  end
  if newest < SLICES or counter[newest] < start_s then
    counter[#counter + 1], counter[#counter + 2] = start_s, 0
  else
    start_s = counter[newest]
  end
  if early then
    counter[#counter] = counter[#counter] + early
    -- Also by a call that refuses: else what was early would be so again in each later slice.
    save_counters(limit.hash, {limit.id}, {counter})
  end
  while #counter > SLICES + 3 and counter[SLICES + 2] < start_s - limit.kept_s do
    table.remove(counter, SLICES)
    table.remove(counter, SLICES)
  end
  return start_s
end

-- The start of the current slice, and what was used in the window; of sequences, those in flight.
local function measure(counter, limit)
  if limit.unit == 'sequences' then return 0, reserved_of(counter) end
  local start_s = roll(counter, limit)
  return start_s, level(counter, start_s - limit.kept_s)
end

local function read(asked)
  local limits, ids = {}, {}
  for i = 2, #asked do
    local limit
    limit = READ_limit(asked[i][2])
    limit.wanted, limit.most, limit.hash = asked[i][1], asked[i][3], asked[1]
    limits[i - 1], ids[i - 1] = limit, limit.id
  end
  return {hash = asked[1], counters = counters_of(asked[1], ids), ids = ids, limits = limits}
end

-- The denial by the first limit that the request passes, unless a later one could never hold it,
-- and whether one demotes it.
local function weigh(known, service_s)
  local demoted, denial = false, nil
  for i, limit in ipairs(known.limits) do
    local counter = known.counters[i]
    local amount = allowed(counter, limit.amount)
    local start_s, spent = measure(counter, limit)
    local windowed = start_s > 0
    local used = windowed and spent + reserved_of(counter) or spent
    if used + limit.wanted > amount then
      local reserved = more().heal(known.hash, counter)
      used = windowed and spent + reserved or reserved
      if not windowed then spent = used end
    end
    limit.began_s, limit.spent = start_s, spent
    if limit.wanted == 0 or used + limit.wanted <= amount then
      -- it fits
    elseif limit.spot then
      demoted = true
    elseif not denial or limit.wanted > max(amount, limit.amount) then
      denial = more().denial(known, i, amount, used, start_s, service_s)
      if denial[1] == 'exceeds_entitlement' then break end
    end
  end
  return denial, demoted
end

-- Takes what the request may use; returns the lease's `held`, and each limit's level, amount and
-- whether this request crossed the level that warns.
local function reserve(known)
  local held, uses = {known.hash}, {}
  for i, limit in ipairs(known.limits) do
    local counter, start_s, used, crossed = known.counters[i], limit.began_s, limit.spent, false
    if not used then start_s, used = measure(counter, limit) end
    used = used + limit.wanted
    if limit.unit == 'requests' then
      post(counter, start_s, limit.most)
    else
      hold(counter, limit.most)
    end
    if 0 < limit.warn and limit.warn <= used and counter[WARNED_S] < start_s - limit.kept_s then
      counter[WARNED_S], crossed = start_s, true
    end
    held[#held + 1] = {known.ids[i], limit.unit, start_s, limit.most, limit.wanted}
    uses[#uses + 1] = {used, allowed(counter, limit.amount), crossed}
  end
  save_counters(known.hash, known.ids, known.counters)
  return held, uses
end

-- Changes the counters of a lease's limits: `sign` -1 ends its reservations, 1 begins them again,
-- and `used` gives for each of them what is counted besides.
local function change(held, sign, used)
  local counters, ids = counters_held(held)
  for i, counter in ipairs(counters) do
    local _, unit, slice_s, amount, expected = unpack(held[i + 1])
    if unit ~= 'requests' then hold(counter, sign * amount) end
    local more = unit ~= 'sequences' and used(unit, amount, expected) or 0
    if more ~= 0 then post(counter, slice_s, more) end
  end
  save_counters(held[1], ids, counters)
end

-- What was used: of `spent`, {tokens, money} or false for nothing. A request was counted when it
-- was admitted.
local function used_by(spent)
  return function(unit, amount)
    if unit == 'requests' then return spent and 0 or -amount end
    return spent and spent[unit == 'tokens' and 1 or 2] or 0
  end
end

make_more = function()
-- MORE
end

return {
  more = more, read = read, weigh = weigh, reserve = reserve,
  settle = function(held, spent) change(held, -1, used_by(spent)) end,
}
